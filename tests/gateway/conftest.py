"""A gateway in front of a scripted executor, served by uvicorn on a free port."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.gateway.scripted import ScriptedExecutor
from trunkline.gateway.app import build_app
from trunkline.gateway.records import RunRecords
from trunkline.gateway.responses.store import ResponseStore
from trunkline.gateway.server import listen
from trunkline.gateway.settings import GatewaySettings


@dataclass
class Served:
    """One running gateway and what stands behind it."""

    port: int
    app: Starlette
    executor: ScriptedExecutor
    records: RunRecords
    responses: ResponseStore
    client: httpx.Client
    loop: asyncio.AbstractEventLoop

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST `body` as JSON."""
        return self.client.post(path, json=body, **options)

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        """One chat request with one user message. `headers` are the request's, the rest its fields."""
        headers = fields.pop("headers", {})
        body = {"model": "scripted", "messages": [{"role": "user", "content": content}], **fields}
        return self.post("/v1/chat/completions", body, headers=headers)


Serve = Callable[..., Served]


class Host:
    """A uvicorn server in a thread, serving whichever application a test puts into `app`: starting one takes long."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self._listener = listen("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(self, log_level="warning", lifespan="off"))
        started: Future[asyncio.AbstractEventLoop] = Future()

        async def serve() -> None:
            started.set_result(asyncio.get_running_loop())
            await self._server.serve(sockets=[self._listener])

        self._thread = Thread(target=lambda: asyncio.run(serve()))
        self._thread.start()
        self.loop = started.result()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        await self.app(scope, receive, send)

    def stop(self) -> None:
        """Stop the server."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@pytest.fixture(scope="session")
def idle_hosts() -> Iterator[list[Host]]:
    """Hosts that no test uses at the moment."""
    hosts: list[Host] = []
    yield hosts
    for host in hosts:
        host.stop()


@pytest.fixture
def serve(idle_hosts: list[Host]) -> Iterator[Serve]:
    """Start gateways with given settings; all are stopped at the end of the test."""
    yield from _serving(idle_hosts)


@pytest.fixture(scope="module")
def serve_module(idle_hosts: list[Host]) -> Iterator[Serve]:
    """As `serve`, for a whole module."""
    yield from _serving(idle_hosts)


@pytest.fixture
def gateway(serve: Serve) -> Served:
    """A gateway with default settings."""
    return serve()


def _serving(idle_hosts: list[Host]) -> Iterator[Serve]:
    used: list[tuple[Host, Served]] = []

    def start(**settings: Any) -> Served:
        host = idle_hosts.pop() if idle_hosts else Host()
        records = RunRecords(None)
        responses = ResponseStore(None, max_bytes=1_000_000)
        executor = ScriptedExecutor(records.turn)
        app = host.app = build_app(executor, records, GatewaySettings(**settings), responses)
        client = httpx.Client(base_url=f"http://127.0.0.1:{host.port}", timeout=30)
        served = Served(host.port, app, executor, records, responses, client, host.loop)
        used.append((host, served))
        return served

    yield start
    for host, served in used:
        served.client.close()
        asyncio.run_coroutine_threadsafe(_land(served), host.loop).result()
        served.records.close()
        served.responses.close()
        idle_hosts.append(host)


async def _land(served: Served) -> None:
    """Stop what a test left in flight."""
    await served.app.state.flights.drain(0)
    while len(served.app.state.flights):
        await asyncio.sleep(0)
