"""Fixtures that several folders share."""

from collections.abc import Iterator

import pytest

from tests.live import LiveServer, live_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The default model on the embedded engine, with a context of 2,048 tokens; shared by all tests."""
    with live_server(tmp_path_factory.mktemp("server"), "--ctx", "2048") as running:
        yield running
