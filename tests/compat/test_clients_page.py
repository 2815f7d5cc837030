"""What docs/clients.md tells people to type works, and ends with what the tool returned."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.conftest import ROOT, Node
from tests.compat.harbour import LEVELS
from tests.compat.scenes import call

PAGE = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
ADDRESS, MODEL, QUESTION = "http://127.0.0.1:8000", "smollm2-135m-instruct", "How is the tide at the pier?"
TOOL, *PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMES = re.findall(r"### ([^\n]+)\n(?:(?!###).)*?```python", PAGE, re.DOTALL)


@pytest.mark.parametrize(("name", "program"), [*zip(NAMES, PROGRAMS, strict=True)], ids=NAMES)
def test_a_program_of_the_page_works_as_it_stands(smollm2: Node, tmp_path: Path, name: str, program: str) -> None:
    answer = "At the pier: {last}."
    task = smollm2.scene(
        f"page-{PROGRAMS.index(program)}",
        call("tide", place="pier"),
        call("final_answer", answer=answer) if name == "smolagents" else answer,
    )
    assert QUESTION in program
    text = TOOL + program.replace(QUESTION, f"{task} {QUESTION}").replace(ADDRESS, smollm2.url)
    (tmp_path / "program.py").write_text(text.replace(MODEL, smollm2.model))
    with smollm2.one_run() as seen:
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
        )
    assert done.returncode == 0, done.stderr
    assert LEVELS["pier"] in done.stdout.splitlines()[-1]
    assert seen.turns == [2], str(seen)
