"""The endpoint behind both generation paths: read, parse, start the turns, answer."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from trunkline.gateway.body import read_body
from trunkline.gateway.context import Gateway
from trunkline.gateway.errors import ApiError, ClientGone, Internal
from trunkline.gateway.replies import Asked, EventStream, answer_whole, stream_turns
from trunkline.gateway.turns import open_turns

log = logging.getLogger("trunkline.gateway")

SCOPE_KEY = "trunkline.scope"
"""Where the ASGI scope holds the caller's scope (see `identity`)."""


COMPILED = (b'"tools"', b'format"', b"guided_", b"structured_outputs")
"""What stands in bodies that ask for a grammar, which may take long to compile: never on the event loop."""


class Dialect(Protocol):
    """What a path understands. `blocking`: parsing may read a disk, so that it never runs on the event loop."""

    @property
    def blocking(self) -> bool: ...

    def parse(self, raw: bytes, scope: str, headers: Mapping[str, str]) -> Asked:
        """From a body to a request that can run. Thread-safe. Raises `ApiError`."""


class Generate:
    """One generation path, as an ASGI application: it must see the client leave while it answers."""

    def __init__(self, gateway: Gateway, dialect: Dialect) -> None:
        self._gateway = gateway
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Errors before the first byte are raised, later ones become an event."""
        gateway = self._gateway
        out = EventStream(send)
        asked: Asked | None = None
        try:
            with gateway.flights.enter() as flight, gateway.metrics.http_in_flight.track_inprogress():
                asked = await self._asked(Request(scope, receive))
                async with (
                    flight.watched(receive, gateway.settings.request_timeout_s),
                    open_turns(gateway, asked.prompts, asked.n) as turns,
                ):
                    if asked.stream:
                        await stream_turns(turns, asked, out)
                    else:
                        await answer_whole(turns, asked, send)
        except ClientGone:
            log.debug("%s: the client left", scope["path"])
        except ApiError as error:
            if asked is None or not out.started:
                raise
            await out.end(asked.reply.error(error))
        except Exception:
            if asked is None or not out.started:
                raise
            log.exception("%s failed after its answer began", scope["path"])
            bug = Internal("The server failed while it answered. This is a bug: its log has the traceback.")
            await out.end(asked.reply.error(bug))

    async def _asked(self, request: Request) -> Asked:
        self._gateway.check_ready()
        raw = await read_body(request, self._gateway.settings)
        scope: str = request.scope[SCOPE_KEY]
        small = len(raw) <= self._gateway.settings.inline_body_bytes
        if small and not self._dialect.blocking and not any(word in raw for word in COMPILED):
            return self._dialect.parse(raw, scope, request.headers)
        return await asyncio.to_thread(self._dialect.parse, raw, scope, request.headers)
