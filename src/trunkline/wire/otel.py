"""Reads OpenTelemetry traces of agents: spans with GenAI attributes, as inference-perf stores them (JSON).

A session is the spans of one conversation (a session or conversation id, else the trace). Spans tell times, not who
waited for whom; the shape is read from the times:

    time -->   [ plan ]                        [ merge ] [ ask ]      turns of the root, alone in their time
                        [ a1 ]  [ a2 ]                                a sub-agent of two turns
                          [ b1 ]                                      spans that overlap are different agents

Spans that overlap, directly or through others, are sub-agents. They fork after the root's turn before them, and the
root's next turn waits for them all. Within such a group a span continues the agent whose prompt it extends; else an
agent with the same parent span that had ended.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from trunkline.wire.chats import ChatMessage, answered, change, read_whole, stem
from trunkline.wire.traces import (
    Fork,
    Message,
    RunTrace,
    TraceError,
    TurnTrace,
    trace_files,
)

SESSION_KEYS = ("gen_ai.conversation.id", "session.id", "exgentic.session.id")
CHATS = ("chat", "text_completion", "generate_content")


class _Span(msgspec.Struct):
    span_id: str
    start_time: str
    end_time: str
    attributes: dict[str, Any]
    trace_id: str = ""
    parent_span_id: str | None = None
    name: str = ""


class _Trace(msgspec.Struct):
    spans: list[_Span]
    trace_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One generation. Times are milliseconds since 1970."""

    span: str
    parent: str | None
    start_ms: float
    end_ms: float
    messages: tuple[Message, ...]
    output: Message | None
    output_tokens: int | None
    finish: str
    model: str


def read_otel(path: Path) -> Iterator[RunTrace]:
    """Runs of a file, or of every `.json` file in a folder, session by session. Raises `TraceError`."""
    for file in trace_files(path, ".json"):
        trace = read_whole(file, _Trace, "an OpenTelemetry trace with `spans`")
        sessions: dict[str, list[_Call]] = {}
        for number, span in enumerate(trace.spans):
            if not _generates(span.attributes):
                continue  # an agent's or a tool's span
            try:
                call = _call(span)
            except (ValueError, msgspec.MsgspecError) as error:
                raise TraceError(file, None, f"span {number} ({span.span_id!r}) cannot be read: {error}") from error
            named = next((str(span.attributes[key]) for key in SESSION_KEYS if span.attributes.get(key)), None)
            sessions.setdefault(named or span.trace_id or trace.trace_id or stem(file), []).append(call)
        for name, calls in sessions.items():
            yield from _session(f"{stem(file)}/{name}", sorted(calls, key=lambda call: (call.start_ms, call.end_ms)))


def _generates(attributes: Mapping[str, Any]) -> bool:
    return "gen_ai.input.messages" in attributes and attributes.get("gen_ai.operation.name", "chat") in CHATS


def _call(span: _Span) -> _Call:
    attributes = span.attributes
    outputs = _messages(attributes.get("gen_ai.output.messages"))
    text = attributes.get("gen_ai.output.text")
    finish = attributes.get("gen_ai.response.finish_reason") or attributes.get("gen_ai.response.finish_reasons") or ""
    tokens = attributes.get("gen_ai.usage.output_tokens", attributes.get("gen_ai.usage.completion_tokens"))
    start_ms, end_ms = _time_ms(span.start_time), _time_ms(span.end_time)
    if end_ms < start_ms:
        raise ValueError("it ends before it starts")
    return _Call(
        span=span.span_id,
        parent=span.parent_span_id,
        start_ms=start_ms,
        end_ms=end_ms,
        messages=_messages(attributes["gen_ai.input.messages"]),
        output=outputs[0] if outputs else Message("assistant", str(text)) if text else None,
        output_tokens=None if tokens is None else int(tokens),
        finish=str(finish[0] if isinstance(finish, list) and finish else finish or ""),
        model=str(attributes.get("gen_ai.request.model", "")),
    )


def _messages(value: Any) -> tuple[Message, ...]:
    """Messages as an attribute has them: a list, or JSON text of one."""
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(message.message() for message in msgspec.json.decode(value, type=list[ChatMessage]))
    return tuple(message.message() for message in msgspec.convert(value, list[ChatMessage]))


def _time_ms(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e3


def _session(name: str, calls: Sequence[_Call]) -> Iterator[RunTrace]:
    """One session's calls, in order of their starts, as a root run and its sub-agents."""
    groups = _overlapping(calls)
    root = [group[0] for group in groups if len(group) == 1]
    agents = [(after, agent) for after, group in _counted(groups) for agent in _agents(group)]
    waits = bool(root)
    if not root:  # nothing ran alone: the first agent is the root, and nobody waits for the others
        (_, root), *agents = agents
    began_ms = calls[0].start_ms
    joined_ms: dict[int, float] = {}  # when the last sub-agent ended that this turn of the root waits for
    if waits:
        for after, agent in agents:
            joined_ms[after] = max(joined_ms.get(after, 0.0), agent[-1].end_ms)
    turns = tuple(_turns(root, began_ms, (), None, joined_ms))
    yield RunTrace(id=name, source="otel", begin_ms=began_ms, turns=turns)
    for number, (after, agent) in enumerate(agents, 1):
        held = root[after - 1].messages if after else ()
        left_ms = root[after - 1].end_ms if after else began_ms
        fork = Fork(parent=name, after=after, joins=after if waits and after < len(root) else None)
        turns = tuple(_turns(agent, began_ms, held, left_ms, {}))
        yield RunTrace(id=f"{name}/agent-{number}", source="otel", fork=fork, turns=turns)


def _counted(groups: Sequence[Sequence[_Call]]) -> Iterator[tuple[int, Sequence[_Call]]]:
    """Each group of several calls, with how many calls that ran alone came before it."""
    alone = 0
    for group in groups:
        if len(group) > 1:
            yield alone, group
        alone += len(group) == 1


def _overlapping(calls: Sequence[_Call]) -> list[list[_Call]]:
    """Calls in groups that overlap, directly or through others."""
    groups: list[list[_Call]] = []
    end_ms = float("-inf")
    for call in calls:
        if groups and call.start_ms < end_ms:
            groups[-1].append(call)
        else:
            groups.append([call])
        end_ms = max(end_ms, call.end_ms)
    return groups


def _agents(group: Sequence[_Call]) -> list[list[_Call]]:
    """The calls of a group as the agents that made them."""
    agents: list[list[_Call]] = []
    for call in group:
        ended = [agent for agent in agents if agent[-1].end_ms <= call.start_ms]
        extended = [agent for agent in ended if call.messages[: len(agent[-1].messages)] == agent[-1].messages]
        beside = [agent for agent in ended if call.parent and agent[-1].parent == call.parent]
        if extended:
            max(extended, key=lambda agent: len(agent[-1].messages)).append(call)
        elif beside:
            beside[-1].append(call)
        else:
            agents.append([call])
    return agents


def _turns(
    calls: Sequence[_Call],
    began_ms: float,
    held: Sequence[Message],
    free_ms: float | None,
    joined_ms: Mapping[int, float],
) -> Iterator[TurnTrace]:
    """One agent's calls as turns, from the prompt `held` on.

    The agent was free for its first call at `free_ms` (None: nothing came before it), and for call `i` no earlier than
    `joined_ms[i]`, when its sub-agents had ended.
    """
    for index, call in enumerate(calls):
        free_ms = max((moment for moment in (free_ms, joined_ms.get(index)) if moment is not None), default=None)
        prompt = change(held, call.messages)
        output = call.output
        yield TurnTrace(
            prompt=prompt,
            kind=answered(prompt.add),
            output=None if output is None else output.content,
            calls=() if output is None else output.tool_calls,
            output_tokens=call.output_tokens,
            finish=call.finish,
            model=call.model,
            at_ms=round(call.start_ms - began_ms, 3),
            gap_ms=None if free_ms is None else round(max(0.0, call.start_ms - free_ms), 3),
            latency_ms=round(call.end_ms - call.start_ms, 3),
        )
        held, free_ms = call.messages, call.end_ms
