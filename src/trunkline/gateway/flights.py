"""Generation requests in flight: how many there may be, and the three ways one ends early.

A client that leaves, a request that takes too long and a server that drains all stop a request in the same way: its
task is cancelled, which closes the executor's iterators and so frees their places within a step.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.types import Receive

from trunkline.gateway.errors import ClientGone, Draining, QueueFull, TimedOut
from trunkline.gateway.settings import GatewaySettings

log = logging.getLogger("trunkline.gateway")

RETRY_S = 5.0
"""What a client is told to wait while the server stops and another takes over."""


class Flight:
    """One request. `stop` makes the body of `watched` raise the given reason."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._reason: Exception | None = None

    def stop(self, reason: Exception) -> None:
        """Cancel the watched body, if it still runs, and raise `reason` from it."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

    @asynccontextmanager
    async def watched(self, receive: Receive, timeout_s: float | None) -> AsyncIterator[None]:
        """Run a body (the request's own body must have been read) until it is done, stopped, or too slow."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        gone = asyncio.create_task(_disconnected(receive))
        gone.add_done_callback(lambda done: None if done.cancelled() else self.stop(ClientGone()))
        timer = None
        if timeout_s is not None:
            late = TimedOut(f"The request took longer than {timeout_s:g} s; ask for fewer tokens.")
            timer = asyncio.get_running_loop().call_later(timeout_s, self.stop, late)
        self._task = task
        try:
            yield
        except asyncio.CancelledError:
            # The same book-keeping as asyncio.timeout: a cancellation that is not ours goes on.
            if self._reason is not None and task.uncancel() <= before:
                raise self._reason from None
            raise
        finally:
            self._task = None
            gone.cancel()
            if timer is not None:
                timer.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Flights:
    """All of them. `drain` refuses new ones and waits for the rest."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._max = settings.max_in_flight
        self._flights: set[Flight] = set()
        self._landed = asyncio.Event()
        self.draining = False

    def __len__(self) -> int:
        return len(self._flights)

    @contextmanager
    def enter(self) -> Iterator[Flight]:
        """Raises `Draining` or `QueueFull`."""
        if self.draining:
            raise Draining("The server is stopping; try again in a few seconds.", retry_after_s=RETRY_S)
        if len(self._flights) >= self._max:
            raise QueueFull(f"{self._max} requests are in flight, the most allowed; try again later.", retry_after_s=1)
        flight = Flight()
        self._flights.add(flight)
        try:
            yield flight
        finally:
            self._flights.discard(flight)
            self._landed.set()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, let those in flight finish for `timeout_s`, stop the rest. Returns how many those were.

        Health turns 503 at once. May be called again, with a shorter time.
        """
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty()
        except TimeoutError:
            left = list(self._flights)
            log.warning("drain: stopping %d requests that did not finish within %g s", len(left), timeout_s)
            for flight in left:
                flight.stop(Draining("The server stopped before the answer was whole.", retry_after_s=RETRY_S))
            return len(left)
        return 0

    async def _empty(self) -> None:
        while self._flights:
            self._landed.clear()
            await self._landed.wait()
