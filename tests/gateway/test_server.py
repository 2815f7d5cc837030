"""The server process: it answers at once, drains on a signal, and cleans up."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from trunkline.gateway.server import listen

ROOT = Path(__file__).parents[2]
SERVER = """
import sys, threading
from pathlib import Path
from tests.gateway.scripted import ScriptedExecutor, end, say_and_hang
from trunkline.gateway.app import build_app
from trunkline.gateway.records import RunRecords
from trunkline.gateway.server import listen, run_server
from trunkline.gateway.settings import GatewaySettings

records = RunRecords(Path(sys.argv[1]))
executor = ScriptedExecutor(records.turn)
executor.script = say_and_hang
app = build_app(executor, records, GatewaySettings(drain_timeout_s=float(sys.argv[2])))
listener = listen("127.0.0.1", 0)
run_server(app, listener, on_ready=lambda: print(listener.getsockname()[1], flush=True))
records.close()
print("clean", flush=True)
"""


class Running:
    """A server in a process of its own."""

    def __init__(self, folder: Path, drain_timeout_s: float) -> None:
        command = [sys.executable, "-c", SERVER, str(folder / "runs.sqlite"), str(drain_timeout_s)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{self.line()}"

    def line(self) -> str:
        """The next line it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    server = Running(tmp_path, request.param)
    yield server
    server.process.kill()
    server.process.wait()
    assert server.process.stdout is not None
    server.process.stdout.close()


def test_connections_do_not_wait_to_fill_packets() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_an_os_error() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize("running", [600.0], indirect=True)
def test_a_signal_drains_and_a_second_interrupt_stops_at_once(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with httpx.Client(base_url=running.url, timeout=30) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            events = stream.iter_lines()
            assert "assistant" in next(events)
            os.kill(running.process.pid, signal.SIGINT)
            while client.get("/health").status_code == 200:
                pass
            refused = client.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            os.kill(running.process.pid, signal.SIGINT)
            *_, last = (line for line in events if line)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    assert running.line() == "clean"
    assert running.process.wait() == 0


@pytest.mark.parametrize("running", [0.1], indirect=True)
def test_sigterm_stops_turns_that_outlast_the_drain(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with httpx.Client(base_url=running.url, timeout=30) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            events = stream.iter_lines()
            next(events)
            running.process.terminate()
            *_, last = (line for line in events if line)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    assert running.line() == "clean"
    assert running.process.wait() == 0
