"""Closed-loop replay of run traces against any OpenAI-compatible endpoint.

`lanes` sessions are open at once; each plays its turns in order, waits the recorded tool gaps between them, forks its
sub-agents where the trace forks them and waits for them where it waits. When a session ends, its lane takes the next.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trunkline.bench.client import Endpoint, Reply
from trunkline.bench.events import RunEvent, TurnEvent
from trunkline.bench.filler import Filler
from trunkline.wire.traces import Message, MessagesPrompt, RunTrace, Session, Symbol, TokensPrompt, TurnTrace, added

DEFAULT_OUTPUT_TOKENS = 64


class Form(StrEnum):
    """How token and block prompts are sent: `TOKENS` as ids to `/v1/completions`, exact; `TEXT` as one chat message."""

    TOKENS = "tokens"
    TEXT = "text"


class History(StrEnum):
    """What becomes history: the `RECORDED` answer, or the model's own (`LIVE`, messages only)."""

    RECORDED = "recorded"
    LIVE = "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How to replay. Tool gaps are multiplied by `gap_scale`, then capped; an unknown one counts as `unknown_gap_ms`.

    `session_header` names the header that carries the run's id (None: nothing tells the server which run it serves).
    Outputs have their recorded length (`ignore_eos`), or `output_tokens` where that is not known.
    """

    model: str
    lanes: int = 4
    form: Form = Form.TOKENS
    history: History = History.RECORDED
    session_header: str | None = None
    gap_scale: float = 1.0
    gap_cap_ms: float = 2_000.0
    unknown_gap_ms: float = 0.0
    output_tokens: int = DEFAULT_OUTPUT_TOKENS
    extra_body: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Sent:
    """One turn as it went: its event, and what was sent and answered, for counting reusable tokens afterwards."""

    event: TurnEvent
    prompt: Sequence[int | Message]
    answer: str = ""
    tools: Sequence[Mapping[str, Any]] = ()


class Replay:
    """One replay. `sent` and `runs` fill up while `play` works; times count from its start."""

    def __init__(self, endpoint: Endpoint, settings: ReplaySettings, filler: Filler | None = None) -> None:
        self.endpoint, self.settings, self.filler = endpoint, settings, filler or Filler()
        self.sent: list[Sent] = []
        self.runs: list[RunEvent] = []
        self._began = time.perf_counter()

    def now_ms(self) -> float:
        """Milliseconds since `play` began."""
        return (time.perf_counter() - self._began) * 1e3

    async def play(self, sessions: Iterable[Session], on_turn: Callable[[TurnEvent], None] | None = None) -> None:
        """Play every session once, `lanes` at a time. `on_turn` is told of every turn that ended."""
        self._began = time.perf_counter()
        waiting = iter(sessions)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.settings.lanes):
                group.create_task(self._lane(waiting, on_turn or (lambda event: None)))

    async def _lane(self, waiting: Iterator[Session], on_turn: Callable[[TurnEvent], None]) -> None:
        for session in waiting:
            await _Player(self, session, on_turn).play(session[0], [])


class _Player:
    """Plays one session."""

    def __init__(self, replay: Replay, session: Session, on_turn: Callable[[TurnEvent], None]) -> None:
        self.replay, self.session, self.on_turn = replay, session, on_turn
        self.settings = replay.settings

    async def play(self, run: RunTrace, inherited: Sequence[Symbol]) -> None:
        """One run from first to last turn, with the runs it forks. A failed turn ends its run."""
        forks = [child for child in self.session if child.fork is not None and child.fork.parent == run.id]
        record = RunEvent(run=run.id, session=self.session[0].id, kind=run.kind, started_ms=self.replay.now_ms())
        symbols, answer = list(inherited), None
        joins: dict[int, list[asyncio.Task[None]]] = {}
        async with asyncio.TaskGroup() as group:
            for index, turn in enumerate(run.turns):
                self._fork(group, forks, index, symbols, joins)
                await asyncio.gather(*joins.pop(index, []))
                await asyncio.sleep(self._gap_ms(run, index) / 1e3)
                symbols = _continued(symbols, turn, answer)
                sent = await self._turn(run, index, symbols, record)
                if sent.event.error is not None:
                    record.error = f"turn {index}: {sent.event.error}"
                    break
                record.turns += 1
                answer = sent.answer if self.settings.history is History.LIVE else None
            else:
                self._fork(group, forks, len(run.turns), symbols, joins)
        record.ended_ms = self.replay.now_ms()
        self.replay.runs.append(record)

    def _fork(
        self,
        group: asyncio.TaskGroup,
        forks: Sequence[RunTrace],
        after: int,
        symbols: list[Symbol],
        joins: dict[int, list[asyncio.Task[None]]],
    ) -> None:
        """Start the runs that fork after `after` turns. `joins` gets them under the turn that waits for them."""
        for child in forks:
            assert child.fork is not None
            if child.fork.after == after:
                task = group.create_task(self.play(child, list(symbols)))
                if child.fork.joins is not None:
                    joins.setdefault(child.fork.joins, []).append(task)

    def _gap_ms(self, run: RunTrace, index: int) -> float:
        """How long to wait before a turn: nothing before a root's first."""
        if index == 0 and run.fork is None:
            return 0.0
        gap_ms = run.turns[index].gap_ms
        gap_ms = self.settings.unknown_gap_ms if gap_ms is None else gap_ms
        return min(gap_ms * self.settings.gap_scale, self.settings.gap_cap_ms)

    async def _turn(self, run: RunTrace, index: int, symbols: Sequence[Symbol], record: RunEvent) -> Sent:
        """One turn. Who is told to come back later does, as often as it takes."""
        turn = run.turns[index]
        prompt, path, body = self._request(run, index, symbols)
        body |= {"model": self.settings.model, "temperature": 0, "ignore_eos": True}
        body["max_tokens"] = turn.output_tokens or self.settings.output_tokens
        body |= self.settings.extra_body or {}
        headers = {self.settings.session_header: run.id} if self.settings.session_header else {}
        sent = Sent(TurnEvent(run=run.id, session=self.session[0].id, index=index, sent_ms=0.0), prompt)
        sent.tools = body.get("tools", ())
        while True:
            sent.event.sent_ms = self.replay.now_ms()
            self.replay.sent.append(sent)  # in order of arrival: reuse is counted against what came before
            reply = await self.replay.endpoint.generate(path, body, headers)
            if reply.retry_after_s is None:
                break
            self.replay.sent.remove(sent)
            await asyncio.sleep(reply.retry_after_s)
            record.refusals += 1
            record.refused_ms += self.replay.now_ms() - sent.event.sent_ms
        sent.answer = reply.text
        _note(sent.event, reply)
        self.on_turn(sent.event)
        return sent

    def _request(
        self, run: RunTrace, index: int, symbols: Sequence[Symbol]
    ) -> tuple[Sequence[int | Message], str, dict[str, Any]]:
        """A turn's prompt as sent, the path it goes to and the part of the body that carries it."""
        prompt = run.turns[index].prompt
        if isinstance(prompt, MessagesPrompt):
            messages = [message for message in symbols if isinstance(message, Message)]
            body: dict[str, Any] = {"messages": [message.body() for message in messages]}
            if run.tools:
                body["tools"] = [tool.body() for tool in run.tools]
            return messages, "/v1/chat/completions", body
        ids = [symbol for symbol in symbols if isinstance(symbol, int)]
        if isinstance(prompt, TokensPrompt):
            return ids, "/v1/completions", {"prompt": ids}
        # A named tail is the same wherever it is named; any other is this turn's alone.
        tail = f"{run.id} {index}" if prompt.tail_id is None else f"id {prompt.tail_id}"
        content = (run.space or self.session[0].id, ids, run.block_tokens, tail, prompt.tail_tokens)
        if self.settings.form is Form.TOKENS:
            tokens = self.replay.filler.tokens(*content)
            return tokens, "/v1/completions", {"prompt": tokens}
        messages = [Message("user", self.replay.filler.text(*content))]
        return messages, "/v1/chat/completions", {"messages": [message.body() for message in messages]}


def _continued(symbols: Sequence[Symbol], turn: TurnTrace, answer: str | None) -> list[Symbol]:
    """The next prompt. `answer`, if given, takes the place of the recorded answer to the prompt `symbols`."""
    fresh = added(turn.prompt)
    if answer is not None and turn.prompt.keep == len(symbols) and fresh:
        first = fresh[0]
        if isinstance(first, Message) and first.role == "assistant":
            fresh[0] = Message("assistant", answer)
    return [*symbols[: turn.prompt.keep], *fresh]


def _note(event: TurnEvent, reply: Reply) -> None:
    """Copy what a reply says into its event."""
    event.ttft_ms, event.latency_ms = reply.ttft_ms, reply.latency_ms
    event.prompt_tokens, event.completion_tokens = reply.prompt_tokens, reply.completion_tokens
    event.cached_tokens, event.finish, event.error = reply.cached_tokens, reply.finish, reply.error
