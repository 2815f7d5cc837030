"""The HTTP server around the application: uvicorn, with a drain before it stops.

On the first signal new turns get 503 with `Retry-After` and `/health` turns 503, while those in flight finish, for at
most the application's `drain_timeout_s`; what is left is then stopped. A second interrupt does not wait.
"""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from trunkline.gateway.flights import Flights

GRACE_S = 5
"""How long stopped requests have to say so to their clients."""

POLL_S = 0.1


def listen(host: str, port: int) -> socket.socket:
    """A bound socket for `run_server`; port 0 picks a free one. Raises `OSError`.

    Without TCP_NODELAY, which accepted connections inherit, every answer of two writes waits 40 ms for the client's
    delayed acknowledgement; asyncio sets it only on sockets that it made itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


def run_server(app: Starlette, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve `app` on a socket of `listen` until a signal. `on_ready` is called once connections are accepted."""
    server = DrainingServer(app, on_ready)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener]))


class DrainingServer(uvicorn.Server):
    """A uvicorn server for an application made by `build_app`."""

    def __init__(self, app: Starlette, on_ready: Callable[[], None]) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S))
        self._flights: Flights = app.state.flights
        self._drain_timeout_s: float = app.state.settings.drain_timeout_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain while still listening, then stop."""
        draining = asyncio.create_task(self._flights.drain(self._drain_timeout_s))
        while not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=POLL_S)
        draining.cancel()
        await self._flights.drain(0)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was handled is not raised again: whoever called `run_server` cleans up."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
