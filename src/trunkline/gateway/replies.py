"""How answers leave: the contract of a reply format, and the two ways to drive it (whole, or as server-sent events)."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from starlette.types import Send

from trunkline.core.types import EndReason
from trunkline.gateway.errors import ApiError, Draining, Internal
from trunkline.gateway.flights import RETRY_S
from trunkline.gateway.turns import Turns
from trunkline.wire.openai import Usage
from trunkline.wire.turns import Delta, Ended, PromptLogprobs, TokenLogprob, TurnRequest

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0
"""What JSON gets for minus infinity, which it cannot say."""

encode = msgspec.json.Encoder().encode


def finite(logprob: float) -> float:
    """`logprob`, or the least that JSON can carry."""
    return max(logprob, MIN_LOGPROB)


@dataclass(slots=True)
class Outcome:
    """One choice, whole."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    ended: Ended | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)


class Reply(Protocol):
    """One endpoint's format for one request. A chunk method returns whole SSE events, or nothing to send yet."""

    def prompt_logprobs(self, choice: int, entries: PromptLogprobs) -> None:
        """Keep the prompt's logprobs for the chunks of `choice`."""

    def delta(self, choice: int, delta: Delta, usage: Usage | None) -> bytes:
        """New text of one choice. `usage` so far, if every chunk shall carry it."""

    def last(self, choice: int, ended: Ended, usage: Usage | None) -> bytes:
        """The end of one choice."""

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices."""

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        """The JSON document of a request that did not stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One generation request, ready to run."""

    prompts: tuple[TurnRequest, ...]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    reply: Reply


def run_headers(turns: Turns) -> list[tuple[bytes, bytes]]:
    """The run that the first choice belongs to, and which of its turns this is."""
    first = turns.accepted[0]
    return [(b"x-trunkline-run", first.run.encode("latin-1")), (b"x-trunkline-turn", b"%d" % first.index)]


def check_ended(ended: Ended) -> None:
    """Raise unless the turn ended by itself."""
    if ended.reason is EndReason.ABORTED:
        raise Draining("The server stopped this turn before it was whole; send it again.", retry_after_s=RETRY_S)
    if ended.reason is EndReason.FAILED:
        raise Internal("The engine failed while it generated this turn; send it again.")


class EventStream:
    """A response of server-sent events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send status 200."""
        self.started = True
        fixed = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": fixed + headers})

    async def send(self, events: bytes) -> None:
        """Send whole events."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Send the last events."""
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Too late for a status: send the error as an event, then end without `[DONE]`."""
        await self.end(b"data: " + error.body() + b"\n\n")


async def stream_turns(turns: Turns, asked: Asked, out: EventStream) -> None:
    """Answer as events. The last choice's end is held until the records are visible."""
    await out.start(run_headers(turns))
    reply, meter = asked.reply, turns.meter
    held = b""
    async with aclosing(turns.events()) as events:
        async for choice, event in events:
            usage = meter.of(choice) if asked.continuous_usage else None
            if isinstance(event, Delta):
                chunk = reply.delta(choice, event, usage)
                if chunk:
                    await out.send(chunk)
            elif isinstance(event, Ended):
                check_ended(event)
                if held:
                    await out.send(held)
                held = reply.last(choice, event, usage)
            elif isinstance(event, PromptLogprobs):
                reply.prompt_logprobs(choice, event)
    await turns.settle()
    last_usage = reply.usage(meter.total()) if asked.include_usage else b""
    await out.end(held + last_usage + DONE)


async def answer_whole(turns: Turns, asked: Asked, send: Send) -> None:
    """Answer as one document, after the records are visible."""
    outcomes = [Outcome() for _ in range(len(turns))]
    async with aclosing(turns.events()) as events:
        async for choice, event in events:
            outcome = outcomes[choice]
            if isinstance(event, Delta):
                outcome.texts.append(event.text)
                outcome.logprobs += event.logprobs
            elif isinstance(event, Ended):
                check_ended(event)
                outcome.ended = event
            elif isinstance(event, PromptLogprobs):
                outcome.prompt_logprobs = event
    await turns.settle()
    body = asked.reply.whole(outcomes, turns.meter.total())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *run_headers(turns),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
