"""Scripted servers for real clients, one a model, shared by all tests."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.compat.observed import Observed, one_run
from tests.compat.scenes import Stage
from tests.live import live_server

SIZES = ("--ctx", "8192", "--kv-bytes", "800MB", "--host-bytes", "500MB")
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Node:
    """A running server. `model` is the name that clients ask for."""

    url: str
    model: str
    stage: Stage

    @property
    def v1(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"

    def scene(self, name: str, *answers: str) -> str:
        """The next task that names the scene gets these answers. Returns the words that name it."""
        return self.stage.write(name, answers)

    def one_run(self) -> AbstractContextManager[Observed]:
        """Watch one task; see `observed.one_run`."""
        return one_run(self.url)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The server runs in an environment of its own, as the clients do."""
    parser.addoption("--server-python", default=ROOT / ".venv/bin/python", help="the Python that has trunkline")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Clients are written for asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """SmolLM2 135M: KV that can be cut at any token."""
    with _node(pytestconfig, tmp_path_factory, "smollm2", "smollm2-135m-instruct") as node:
        yield node


@pytest.fixture(scope="session")
def gemma(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Gemma 3 270M, for long prompts: most layers see a sliding window, so reuse is by checkpoints."""
    with _node(pytestconfig, tmp_path_factory, "gemma", "gemma-3-270m") as node:
        yield node


@contextmanager
def _node(config: pytest.Config, folders: pytest.TempPathFactory, model: str, name: str) -> Iterator[Node]:
    folder = folders.mktemp(model)
    scenes = folder / "scenes"
    scenes.mkdir()
    command = [str(config.getoption("--server-python")), "-m", "tests.compat.scripted_server", model, str(scenes)]
    with live_server(folder, *SIZES, serve=command) as server:
        yield Node(server.url, name, Stage(scenes))
