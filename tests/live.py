"""A real server in a process of its own, as `trunkline serve` starts it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

START_S = 240
"""How long a first start may take: the default model is requantized once."""

READY = "trunkline: ready on "


class LiveServer:
    """A running server. `process` may be signalled; leaving `live_server` stops it."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, data_dir: Path, log: Path) -> None:
        self.process = process
        self.url = url
        self.data_dir = data_dir
        self.log = log


SERVE = (sys.executable, "-m", "trunkline.cli", "serve")


@contextmanager
def live_server(data_dir: Path, *arguments: str, serve: Sequence[str] = SERVE) -> Iterator[LiveServer]:
    """Serve on a free port with records in `data_dir`, until the block ends. `arguments` go to the command `serve`."""
    data_dir.mkdir(parents=True, exist_ok=True)
    log = data_dir / "server.log"
    command = [*serve, "--port", "0", "--data-dir", str(data_dir), *arguments]
    with log.open("a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ)
    try:
        server = LiveServer(process, _address(process, log), data_dir, log)
        _wait_until_healthy(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _address(process: "subprocess.Popen[str]", log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    raise AssertionError(f"the server stopped before it was ready:\n{log.read_text()}")


def _wait_until_healthy(server: LiveServer) -> None:
    def healthy() -> bool:
        try:
            return httpx.get(f"{server.url}/health").status_code == 200
        except httpx.TransportError:
            assert server.process.poll() is None, server.log.read_text()
            return False

    wait_for(healthy, START_S)


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll until `condition` holds; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not come true within {timeout_s:g} s"
        time.sleep(0.02)
