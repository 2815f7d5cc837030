"""Reads Weka sessions: recorded coding agents, known by KV block ids, without text.

Two forms share one reader: the public kv-cache-tester files (one JSON object a file, whole `hash_ids` a request) and
delta records (one JSON object a line, `keep` and `add` instead). Only whole blocks have ids; the rest of a prompt is
its tail. A sub-agent's `t` is the moment it ended, or the moment it was launched if nobody waits for it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from trunkline.core.types import Ints
from trunkline.wire.chats import read_whole
from trunkline.wire.traces import (
    MAX_ID,
    BlocksPrompt,
    Fork,
    RunTrace,
    TraceError,
    TurnKind,
    TurnTrace,
    id_runs,
    read_lines,
    trace_files,
)

BlockId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ID)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=MAX_ID)]


class _Request(msgspec.Struct, rename={"input_tokens": "in", "output_tokens": "out"}):
    """One request. `t`, `think_time`, `api_time` and `ttft` are seconds."""

    t: float
    type: str
    input_tokens: int = 0
    output_tokens: int = 0
    model: str = ""
    stop: str = ""
    hash_ids: list[BlockId] | None = None
    keep: int = 0
    add: list[tuple[BlockId, Count]] = []
    input_types: list[str] = []
    think_time: float | None = None
    api_time: float | None = None
    ttft: float | None = None
    # a sub-agent (`type` "subagent") has these instead
    agent_id: str = ""
    subagent_type: str = ""
    duration_ms: float | None = None
    requests: list["_Request"] = []


class _Session(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Request]


class _Blocks:
    """The block ids of a list's previous prompt: how many, and (where requests tell them whole) which."""

    def __init__(self) -> None:
        self.count = 0
        self._ids: Ints = np.empty(0, np.int32)

    def change(self, request: _Request) -> tuple[int, list[tuple[int, int]]]:
        """Become the request's blocks; returns how many were kept, and what was added as runs of (first, count)."""
        if request.hash_ids is None:
            if not 0 <= request.keep <= self.count:
                raise ValueError(f"the request at t={request.t} keeps {request.keep} of {self.count} blocks")
            self.count = request.keep + sum(count for _, count in request.add)
            return request.keep, request.add
        now = np.asarray(request.hash_ids, np.int32)
        shared = min(self.count, len(now))
        differ = np.flatnonzero(self._ids[:shared] != now[:shared])
        keep = int(differ[0]) if len(differ) else shared
        self.count, self._ids = len(now), now
        return keep, id_runs(now[keep:])


_decode = msgspec.json.Decoder(_Session).decode


def read_weka(path: Path) -> Iterator[RunTrace]:
    """Runs of a file or of every trace file in a folder, session by session. Raises `TraceError`."""
    for file in trace_files(path, ".json", ".jsonl"):
        for number, session in _read_sessions(file):
            try:
                yield from _runs(session.id, session.requests, session.block_size)
            except ValueError as error:
                raise TraceError(file, number, str(error)) from error


def _read_sessions(path: Path) -> Iterator[tuple[int, _Session]]:
    """Sessions with their line numbers: one a line, or the whole file as one object spread over lines."""
    for number, line in read_lines(path):
        try:
            session = _decode(line)
        except msgspec.ValidationError as error:
            raise TraceError(path, number, f"not a Weka session: {error}") from error
        except msgspec.DecodeError as error:
            if number > 1:
                raise TraceError(path, number, f"not JSON: {error}") from error
            yield number, read_whole(path, _Session, "Weka sessions, neither one a line nor one in all")
            return
        yield number, session


def _runs(
    run: str,
    requests: Sequence[_Request],
    block: int,
    *,
    kind: str = "agent",
    fork: Fork | None = None,
    began_s: float = 0,
) -> Iterator[RunTrace]:
    """One list of requests as a run, then its sub-agents. `began_s` is the list's time 0 in the session's time."""
    turns: list[TurnTrace] = []
    children: list[tuple[Fork, _Request, float]] = []
    blocks = _Blocks()
    free_s = 0.0  # when the run's last turn, or the last sub-agent it waits for, had ended
    previous: _Request | None = None
    for request in requests:
        if request.type == "subagent":
            waits = request.duration_ms is not None
            start_s = request.t - (request.duration_ms or 0.0) / 1e3
            children.append((Fork(parent=run, after=len(turns), joins=len(turns) if waits else None), request, start_s))
            free_s = max(free_s, request.t if waits else 0.0)
            continue
        joined = any(child.joins == len(turns) for child, _, _ in children)
        gap_s = max(0.0, request.t - free_s) if joined else _gap_s(request, previous)
        turns.append(_turn(request, blocks, block, began_s + request.t, gap_s))
        free_s, previous = request.t + (request.api_time or 0.0), request
    yield RunTrace(id=run, kind=kind, source="weka", fork=fork, block_tokens=block, turns=tuple(turns))
    for number, (child_fork, request, start_s) in enumerate(children, 1):
        name = f"{run}/{request.agent_id or f'agent_{number:03d}'}"
        kind = request.subagent_type or "agent"
        yield from _runs(name, request.requests, block, kind=kind, fork=child_fork, began_s=began_s + start_s)


def _gap_s(request: _Request, previous: _Request | None) -> float | None:
    """Think time where it is recorded, else what the clock leaves after the previous call; None if neither is known."""
    if previous is None:
        return None
    if request.think_time is not None:
        return request.think_time
    if previous.api_time is not None:
        return max(0.0, request.t - previous.t - previous.api_time)
    return None


def _turn(request: _Request, before: _Blocks, block: int, at_s: float, gap_s: float | None) -> TurnTrace:
    """One request as a turn. `before` are the previous prompt's blocks; they become this one's."""
    keep, add = before.change(request)
    tail = request.input_tokens - before.count * block
    if tail < 0:
        raise ValueError(
            f"the request at t={request.t} has {before.count} blocks of {block} but {request.input_tokens} in"
        )
    return TurnTrace(
        prompt=BlocksPrompt(keep=keep, add=tuple(add), tail_tokens=tail),
        kind=_kind(request),
        output_tokens=request.output_tokens,
        finish=request.stop,
        model=request.model,
        at_ms=_ms(at_s),
        gap_ms=_ms(gap_s),
        ttft_ms=_ms(request.ttft),
        latency_ms=_ms(request.api_time),
    )


def _kind(request: _Request) -> TurnKind:
    """A tool's result makes a tool step, also where text comes with it."""
    if "tool_result" in request.input_types:
        return TurnKind.TOOL
    return TurnKind.USER if request.input_types else TurnKind.UNKNOWN


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
