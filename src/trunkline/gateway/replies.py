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
from trunkline.gateway.readers import PlainReader, Reader, ReaderFactory
from trunkline.gateway.turns import Turns
from trunkline.wire.openai import Usage
from trunkline.wire.outputs import Call, CallBegun, Part, Text, Thinking, calls_of
from trunkline.wire.turns import Delta, Ended, Placed, PromptLogprobs, TokenLogprob, TurnRequest

DONE = b"data: [DONE]\n\n"
"""How OpenAI's older streams end; other APIs say it in events of their own."""

TOOL_CALLS = "tool_calls"
NOTHING = Delta((), "")

MIN_LOGPROB = -9999.0
"""What JSON gets for minus infinity, which it cannot say."""

encode = msgspec.json.Encoder().encode


def finite(logprob: float) -> float:
    """`logprob`, or the least that JSON can carry."""
    return max(logprob, MIN_LOGPROB)


@dataclass(frozen=True, slots=True)
class Finish:
    """How one choice ended. `reason` is OpenAI's: `tool_calls` for a turn that ended by itself and called tools.

    `stopped_by` is the stop string or requested stop token that ended it, if one did. `thinking_tokens` are those up to
    the last piece of thinking.
    """

    reason: str
    stopped_by: str | int | None
    thinking_tokens: int = 0


@dataclass(slots=True)
class Outcome:
    """One choice, whole. `steps` are its pieces: what each made certain, and the logprobs of its tokens."""

    steps: list[tuple[Sequence[Part], Sequence[TokenLogprob]]] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finish: Finish | None = None

    @property
    def parts(self) -> list[Part]:
        """All parts."""
        return [part for parts, _ in self.steps for part in parts]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """The logprobs of all tokens."""
        return [entry for _, entries in self.steps for entry in entries]

    @property
    def text(self) -> str:
        """All of the answer's text."""
        return "".join([part.text for part in self.parts if isinstance(part, Text)])

    @property
    def thinking(self) -> str:
        """All of the reasoning."""
        return "".join([part.text for part in self.parts if isinstance(part, Thinking)])

    @property
    def calls(self) -> list[Call]:
        """The calls, in order."""
        return calls_of(self.parts)


class Reply(Protocol):
    """One endpoint's format for one request. Except `whole`, methods return whole SSE events, or b"" for none yet.

    A stream is: `opening`, then for each choice `placed`, `delta` any number of times, `last`; then `end`. After an
    error it is cut short by `error`.
    """

    def opening(self) -> bytes:
        """What a stream begins with, once every choice was accepted."""

    def placed(self, choice: int, usage: Usage) -> bytes:
        """A choice got its place: `usage` has its prompt's tokens, cached ones too. Comes before its first `delta`."""

    def prompt_logprobs(self, choice: int, entries: PromptLogprobs) -> None:
        """Keep the prompt's logprobs for the chunks of `choice`."""

    def delta(self, choice: int, parts: Sequence[Part], delta: Delta, usage: Usage | None) -> bytes:
        """New tokens of one choice, and the parts they completed (perhaps none, perhaps of earlier tokens).

        `usage` so far, if every chunk shall carry it.
        """

    def last(self, choice: int, finish: Finish, usage: Usage | None) -> bytes:
        """The end of one choice."""

    def end(self, usage: Usage) -> bytes:
        """What follows the last choice. `usage` is the whole request's."""

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream early."""

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        """The JSON document of a request that did not stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One generation request, ready to run. `reader` makes what reads each choice."""

    prompts: tuple[TurnRequest, ...]
    n: int
    stream: bool
    continuous_usage: bool = False
    reply: Reply
    reader: ReaderFactory = PlainReader


def run_headers(turns: Turns) -> list[tuple[bytes, bytes]]:
    """The run that the first choice belongs to, and which of its turns this is."""
    first = turns.accepted[0]
    return [(b"x-trunkline-run", first.run.encode("latin-1")), (b"x-trunkline-turn", b"%d" % first.index)]


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
        """Send whole events, if there are any."""
        if events:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Send the last events."""
        await self._send({"type": "http.response.body", "body": events, "more_body": False})


class _Choice:
    """One choice as it is read: its reader, whether it called a tool, and how many tokens it thought."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._called = False
        self._tokens = 0
        self._thinking_tokens = 0

    def feed(self, delta: Delta) -> Sequence[Part]:
        self._tokens += len(delta.tokens)
        return self._noted(self._reader.feed(delta.text))

    def _noted(self, parts: Sequence[Part]) -> Sequence[Part]:
        for part in parts:
            if isinstance(part, Thinking):
                self._thinking_tokens = self._tokens
            elif isinstance(part, CallBegun):
                self._called = True
        return parts

    def finish(self, ended: Ended) -> tuple[Sequence[Part], Finish]:
        """The parts that were left, and how it ended. Raises `ApiError` unless the turn ended by itself."""
        if ended.reason is EndReason.ABORTED:
            raise Draining("The server stopped this turn before it was whole; send it again.", retry_after_s=RETRY_S)
        if ended.reason is EndReason.FAILED:
            raise Internal("The engine failed while it generated this turn; send it again.")
        rest = self._noted(self._reader.end())
        called = self._called and ended.reason is EndReason.STOP
        return rest, Finish(TOOL_CALLS if called else ended.reason.value, ended.stopped_by, self._thinking_tokens)


async def stream_turns(turns: Turns, asked: Asked, out: EventStream) -> None:
    """Answer as events. The last choice's end is held until the records are visible."""
    await out.start(run_headers(turns))
    reply, meter = asked.reply, turns.meter
    choices = [_Choice(asked.reader()) for _ in range(len(turns))]
    await out.send(reply.opening())
    held = b""
    async with aclosing(turns.events()) as events:
        async for at, event in events:
            usage = meter.of(at) if asked.continuous_usage else None
            if isinstance(event, Delta):
                await out.send(reply.delta(at, choices[at].feed(event), event, usage))
            elif isinstance(event, Placed):
                await out.send(reply.placed(at, meter.of(at)))
            elif isinstance(event, Ended):
                rest, finish = choices[at].finish(event)
                if rest:
                    await out.send(reply.delta(at, rest, NOTHING, usage))
                await out.send(held)
                held = reply.last(at, finish, usage)
            elif isinstance(event, PromptLogprobs):
                reply.prompt_logprobs(at, event)
    await turns.settle()
    await out.end(held + reply.end(meter.total()))


async def answer_whole(turns: Turns, asked: Asked, send: Send) -> None:
    """Answer as one document, after the records are visible."""
    outcomes = [Outcome() for _ in range(len(turns))]
    choices = [_Choice(asked.reader()) for _ in range(len(turns))]
    async with aclosing(turns.events()) as events:
        async for at, event in events:
            outcome, choice = outcomes[at], choices[at]
            if isinstance(event, Delta):
                outcome.steps.append((choice.feed(event), event.logprobs))
            elif isinstance(event, Ended):
                rest, outcome.finish = choice.finish(event)
                outcome.steps.append((rest, ()))
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
