"""How turns end early: clients that leave, requests that take too long, servers that drain."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Serve, Served
from tests.gateway.scripted import ScriptedExecutor, end, say_and_hang
from tests.gateway.test_errors import error_of
from trunkline.wire.turns import Accepted, TurnRequest

BODY = {"messages": [{"role": "user", "content": "x"}]}


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until another thread makes `condition` true; the test's timeout is the limit."""
    while not condition():
        time.sleep(0.002)


def raw_request(gateway: Served, body: dict[str, Any]) -> socket.socket:
    """A connection on which a chat request has been sent."""
    connection = socket.create_connection(("127.0.0.1", gateway.port))
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_aborts_its_turns(gateway: Served, stream: bool, n: int) -> None:
    gateway.executor.script = say_and_hang
    connection = raw_request(gateway, BODY | {"stream": stream, "n": n})
    wait_for(lambda: gateway.executor.open_turns == n)
    connection.close()
    wait_for(lambda: gateway.executor.open_turns == 0)
    assert gateway.executor.aborted == n
    wait_for(lambda: len(gateway.app.state.flights) == 0)


def test_a_client_that_leaves_before_its_turn_is_accepted_aborts_it(gateway: Served) -> None:
    async def never_accept(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        await asyncio.Event().wait()
        yield accepted

    gateway.executor.script = never_accept
    connection = raw_request(gateway, BODY)
    wait_for(lambda: gateway.executor.open_turns == 1)
    connection.close()
    wait_for(lambda: gateway.executor.open_turns == 0)


def test_a_client_that_leaves_is_counted_as_499(gateway: Served) -> None:
    gateway.executor.script = say_and_hang
    connection = raw_request(gateway, BODY)
    wait_for(lambda: gateway.executor.open_turns == 1)
    connection.close()
    wait_for(lambda: 'status="499"' in gateway.client.get("/metrics").text)


def test_a_server_serves_on_after_clients_left(gateway: Served) -> None:
    script = gateway.executor.script
    gateway.executor.script = say_and_hang
    for _ in range(10):
        raw_request(gateway, BODY | {"stream": True}).close()
    gateway.executor.script = script
    assert gateway.chat().status_code == 200
    wait_for(lambda: gateway.executor.open_turns == 0)


def test_a_request_that_takes_too_long_is_a_504_or_an_error_event(serve: Serve) -> None:
    gateway = serve(request_timeout_s=0.05)
    gateway.executor.script = say_and_hang
    assert error_of(gateway.chat(), 504)["code"] == "request_timeout"
    assert last_error(gateway.chat(stream=True)) == "request_timeout"
    assert gateway.executor.open_turns == 0


def last_error(response: httpx.Response) -> str:
    """The code of the error event that ends a stream."""
    event = [line for line in response.text.split("\n\n") if line][-1]
    code: str = json.loads(event.removeprefix("data: "))["error"]["code"]
    return code


def drain(gateway: Served, timeout_s: float) -> Any:
    """Start to drain on the server's loop; a concurrent future of how many requests were stopped."""
    return asyncio.run_coroutine_threadsafe(gateway.app.state.flights.drain(timeout_s), gateway.loop)


def test_draining_refuses_new_turns_and_lets_running_ones_finish(gateway: Served) -> None:
    release = threading.Event()

    async def wait_for_release(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        yield accepted
        await asyncio.to_thread(release.wait)
        yield end(request, accepted, spoken=0)

    gateway.executor.script = wait_for_release
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gateway.chat)
        wait_for(lambda: gateway.executor.open_turns == 1)
        stopped = drain(gateway, 60)
        wait_for(lambda: bool(gateway.app.state.flights.draining))
        refused = gateway.chat()
        assert error_of(refused, 503)["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        assert error_of(gateway.client.get("/health"), 503)["code"] == "not_ready"
        assert not stopped.done()
        release.set()
        assert running.result().status_code == 200
        assert stopped.result() == 0


def test_draining_stops_what_does_not_finish_in_time(gateway: Served) -> None:
    gateway.executor.script = say_and_hang
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(gateway.chat)
        streamed = pool.submit(gateway.chat, stream=True)
        wait_for(lambda: gateway.executor.open_turns == 2)
        assert drain(gateway, 0).result() == 2
        assert error_of(whole.result(), 503)["code"] == "draining"
        assert last_error(streamed.result()) == "draining"
    assert gateway.executor.open_turns == 0
