"""`make demo`: a real server, a real model, an agent that knows nothing of us, and what its run looked like.

Starts `trunkline serve` on a free port with records in a temporary folder, runs examples/agent_loop.py against it, and
prints every run turn by turn.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READY = "trunkline: ready on "


def main() -> int:
    """Run the demo; the exit status is the agent's."""
    with tempfile.TemporaryDirectory() as folder:
        trunkline = [sys.executable, "-m", "trunkline.cli"]
        command = [*trunkline, "serve", "--port", "0", "--data-dir", folder]
        print("demo: starting the server:", "trunkline", *command[3:], flush=True)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                address = _address(server)
                print(f"demo: an agent reads this repository's files through {address}", flush=True)
                agent = [sys.executable, "examples/agent_loop.py", "--base-url", address]
                status = subprocess.run(agent, cwd=ROOT, check=False).returncode
                print("\ndemo: trunkline runs", flush=True)
                subprocess.run([*trunkline, "runs", "--data-dir", folder], check=True)
                for run in _run_ids(trunkline, folder):
                    print(f"\ndemo: trunkline run {run}", flush=True)
                    subprocess.run([*trunkline, "run", run, "--data-dir", folder], check=True)
            finally:
                server.terminate()
    return status


def _address(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    raise SystemExit("demo: the server did not start; see its messages above")


def _run_ids(trunkline: list[str], folder: str) -> list[str]:
    shown = subprocess.run(
        [*trunkline, "runs", "--json", "--data-dir", folder], check=True, capture_output=True, text=True
    )
    return [run["id"] for run in reversed(json.loads(shown.stdout))]


if __name__ == "__main__":
    sys.exit(main())
