"""mini-swe-agent, a coding agent of the terminal, started as its users start it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.compat.conftest import Node
from tests.compat.harbour import LEVELS
from tests.compat.observed import kept_history
from tests.compat.scenes import call
from tests.compat.test_clients_page import ADDRESS, MODEL, PAGE


def test_a_coding_agent_of_the_terminal_does_its_task_in_one_run(gemma: Node, tmp_path: Path) -> None:
    (tmp_path / "gauge.txt").write_text(f"pier: {LEVELS['pier']}\n")
    steps = {
        "I look at the gauge.": "cat gauge.txt",
        "I write down what it said.": "printf %s '{last}' > log.txt; wc -l gauge.txt",
        "Done.": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    }
    task = gemma.scene("mini", *(f"{thought}\n{call('bash', command=step)}" for thought, step in steps.items()))
    (line,) = re.findall(r"```bash\n(OPENAI_API_KEY=.*?mini .*?)```", PAGE, re.DOTALL)
    line = line.replace(ADDRESS, gemma.url).replace(MODEL, gemma.model).replace('-t "', f'-t "{task} ')
    alone = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MSWEA_CONFIGURED": "true",  # asks nothing
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "config"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # looks nothing up on the network
    }
    with gemma.one_run() as seen:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=os.environ | alone,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert LEVELS["pier"] in (tmp_path / "log.txt").read_text()
    assert seen.turns == [3], str(seen)
    assert kept_history(seen.run) >= 0.95
