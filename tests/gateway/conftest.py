"""A gateway in front of a scripted executor, served by uvicorn on a free port."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from tests.gateway.scripted import ScriptedExecutor
from trunkline.gateway.app import build_app
from trunkline.gateway.records import RunRecords
from trunkline.gateway.settings import GatewaySettings


@dataclass
class Served:
    """One running gateway and what stands behind it."""

    url: str
    port: int
    app: Starlette
    executor: ScriptedExecutor
    records: RunRecords
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


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start gateways with given settings; all are stopped at the end."""
    stops: list[Callable[[], None]] = []

    def start(**settings: Any) -> Served:
        served, stop = _start(GatewaySettings(**settings))
        stops.append(stop)
        return served

    yield start
    for stop in stops:
        stop()


@pytest.fixture
def gateway(serve: Serve) -> Served:
    """A gateway with default settings."""
    return serve()


def _start(settings: GatewaySettings) -> tuple[Served, Callable[[], None]]:
    records = RunRecords(None)
    executor = ScriptedExecutor(records.turn)
    app = build_app(executor, records, settings)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    started: Future[asyncio.AbstractEventLoop] = Future()

    async def serve_forever() -> None:
        started.set_result(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = Thread(target=lambda: asyncio.run(serve_forever()))
    thread.start()
    loop = started.result()
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
    served = Served(str(client.base_url), port, app, executor, records, client, loop)

    def stop() -> None:
        client.close()
        server.should_exit = True
        thread.join()
        listener.close()
        records.close()

    return served, stop
