"""An executor that says what a test tells it to: one token a byte, no model, no clock of its own."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trunkline.core.types import EndReason, Ints, RunKey
from trunkline.gateway.executor import ConstraintError, ModelInfo, TemplateError
from trunkline.wire.records import MissRow, TurnRow
from trunkline.wire.turns import (
    Accepted,
    Admitted,
    CallFormat,
    Constraint,
    Delta,
    Ended,
    Failed,
    Placed,
    PromptLogprobs,
    RunHint,
    RunPlan,
    TemplateTraits,
    TokenLogprob,
    TurnEvent,
    TurnRequest,
)

Sink = Callable[[str, str, str | None, str, TurnRow], None]
Script = Callable[["ScriptedExecutor", TurnRequest, Accepted], AsyncIterator[TurnEvent]]

CONTEXT = 512
BOS = 256
EOS = 257


def make_row(**changes: Any) -> TurnRow:
    """A turn record of plausible figures."""
    figures: dict[str, Any] = {
        "index": 0,
        "at": 1_700_000_000.0,
        "node": "engine",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "novel_tokens": 6,
        "reusable_tokens": 4,
        "completion_tokens": 3,
        "misses": (MissRow(reason="never_seen", tokens=6),),
        "queue_ms": 1.0,
        "prefill_ms": 2.0,
        "decode_ms": 3.0,
        "latency_ms": 6.0,
        "tool_gap_ms": None,
        "finish_reason": "stop",
    }
    return TurnRow(**(figures | changes))


class ScriptedExecutor:
    """Answers every turn with `reply`, byte by byte, unless a test sets another `script`."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.reply = "hello"
        self.script: Script = say_reply
        self.context = CONTEXT
        self.traits = TemplateTraits(CallFormat.HERMES)
        self.not_ready: str | None = None
        self.requests: list[TurnRequest] = []
        self.strict_template = False
        """Whether the template takes a system message only at the beginning, and users' and answers only in turn."""
        self.rendered: list[list[Mapping[str, Any]]] = []
        self.options: list[Mapping[str, Any]] = []
        self.aborted = 0
        self.open_turns = 0
        self.declared: list[tuple[RunKey, RunPlan]] = []
        self.refuse_runs: Failed | None = None
        self.turn_away: Failed | None = None
        self.asked: list[tuple[str, RunHint, str]] = []
        self.finished: list[RunKey] = []
        self.resets = 0
        self.constraints: list[Constraint] = []
        self.constraint_error: str | None = None
        self.engine_gauges: dict[str, float] = {"running": 0, "waiting": 0}
        self._turns: dict[RunKey, int] = {}
        self._new_runs = 0

    @property
    def model(self) -> ModelInfo:
        return ModelInfo("scripted", self.context, 1_700_000_000, 258, self.traits)

    def ready(self) -> str | None:
        return self.not_ready

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        self.rendered.append(list(messages))
        self.options.append(options)
        if any(message["content"] == "refuse me" for message in messages):
            raise TemplateError("roles must alternate")
        if self.strict_template and not _in_turn([message["role"] for message in messages]):
            raise TemplateError("roles must alternate")
        tools = "".join(f"<tool {tool['function']['name']}>" for tool in options.get("tools", ()))
        text = tools + "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + "<assistant>" if options.get("add_generation_prompt", True) else text

    def tokenize(self, text: str, *, salt: str, bos: bool = True) -> Ints:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        bos = bos and not text.startswith("<")  # what the template below writes counts as its own BOS
        return np.concatenate([np.array([BOS], np.int32), tokens]) if bos else tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        specials = {BOS: b"<bos>", EOS: b"<eos>"}
        return b"".join(specials.get(token) or bytes([token]) for token in tokens).decode(errors="replace")

    def check_constraint(self, constraint: Constraint) -> None:
        self.constraints.append(constraint)
        if self.constraint_error is not None:
            raise ConstraintError(self.constraint_error)

    async def generate(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        self.requests.append(request)
        self.open_turns += 1
        finished = False
        try:
            accepted = self._accept(request)
            async for event in self.script(self, request, accepted):
                if isinstance(event, Ended):
                    finished = True
                    self.sink(request.salt, accepted.run, accepted.parent, request.hint.origin, event.row)
                yield event
        finally:
            self.open_turns -= 1
            if not finished:
                self.aborted += 1

    def _accept(self, request: TurnRequest) -> Accepted:
        run = request.hint.run or request.hint.group  # every turn of a session goes to its main run
        if run is None:
            self._new_runs += 1
            run = f"inferred-{self._new_runs}"
        key = RunKey(request.salt, run)
        index = self._turns.get(key, 0)
        self._turns[key] = index + 1
        return Accepted(run=run, index=index, parent=request.hint.parent)

    def turned_away(self, salt: str, hint: RunHint, kind: str) -> Failed | None:
        self.asked.append((salt, hint, kind))
        return self.turn_away

    async def declare_run(self, key: RunKey, plan: RunPlan) -> Admitted | Failed:
        if self.refuse_runs is not None:
            return self.refuse_runs
        self.declared.append((key, plan))
        return Admitted(turns=12.0, peak_tokens=3456.0)

    def finish_run(self, key: RunKey) -> None:
        self.finished.append(key)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def gauges(self) -> Mapping[str, float]:
        return self.engine_gauges


def _in_turn(roles: Sequence[str]) -> bool:
    spoken = roles[1:] if roles and roles[0] == "system" else roles
    return all(role == ("user", "assistant")[at % 2] for at, role in enumerate(spoken))


async def say_reply(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> AsyncIterator[TurnEvent]:
    """Accept, say the executor's reply within the request's limit, end."""
    yield accepted
    cached = len(request.tokens) // 2
    yield Placed(cached)
    if request.prompt_logprobs:
        yield PromptLogprobs((None, *(logprob_of(int(token), request) for token in request.tokens[1:])))
    spoken = executor.reply.encode()[: request.max_tokens]
    for token in spoken:
        await asyncio.sleep(0)
        logprobs = () if request.logprobs is None else (logprob_of(token, request),)
        yield Delta((token,), chr(token), logprobs)
    yield end(request, accepted, spoken=len(spoken), cached=cached)


async def say_and_hang(
    executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted
) -> AsyncIterator[TurnEvent]:
    """Accept, say one letter, then never end."""
    yield accepted
    yield Placed(0)
    yield Delta((97,), "a")
    await asyncio.Event().wait()


def logprob_of(token: int, request: TurnRequest) -> TokenLogprob:
    """The token with probability e^-0.5, and its successors as alternatives."""
    top = tuple((token + at, -0.5 - at) for at in range(request.logprobs or 0))
    return TokenLogprob(token, -0.5, top)


def end(
    request: TurnRequest,
    accepted: Accepted,
    *,
    spoken: int,
    cached: int = 0,
    reason: EndReason | None = None,
) -> Ended:
    """The end of a turn that said `spoken` tokens."""
    prompt = len(request.tokens)
    if reason is None:
        reason = EndReason.LENGTH if spoken == request.max_tokens else EndReason.STOP
    row = make_row(
        index=accepted.index,
        prompt_tokens=prompt,
        cached_tokens=cached,
        novel_tokens=prompt - cached,
        misses=(MissRow(reason="never_seen", tokens=prompt - cached),),
        completion_tokens=spoken,
        finish_reason=reason,
        normalized=dict(request.normalized),
    )
    return Ended(reason, row)
