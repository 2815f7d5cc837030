"""Reads SWE-agent trajectories: one `.traj` file (JSON) a run, with the whole chat and sometimes the tools' times.

The chat is taken as the file's `history` has it. SWE-agent can send a shortened history (old observations elided); its
files of this version do not say what was sent, so what is read here is the append-only chat.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from trunkline.wire.chats import ChatMessage, chat_turns, read_whole, stem
from trunkline.wire.traces import RunTrace, TraceError, TurnKind, TurnTrace, trace_files

NOTE = "append-only history; what a history processor elided is not known"


class _Entry(ChatMessage):
    is_demo: bool | None = None


class _Step(msgspec.Struct):
    """One step. `execution_time` is the seconds that its tool took."""

    execution_time: float | None = None


class _Trajectory(msgspec.Struct):
    history: list[_Entry]
    trajectory: list[_Step] = []


def read_swe_agent(path: Path) -> Iterator[RunTrace]:
    """Runs of a file, or of every `.traj` file in a folder. Raises `TraceError`."""
    for file in trace_files(path, ".traj", ".json"):
        read = read_whole(file, _Trajectory, "a SWE-agent trajectory")
        given = [bool(entry.is_demo) for entry in read.history]
        turns = list(chat_turns([entry.message() for entry in read.history], given))
        if not turns:
            raise TraceError(file, None, "a SWE-agent trajectory without an answer of the model")
        yield RunTrace(
            id=stem(file), kind="swe-agent", source="swe_agent", turns=tuple(_timed(turns, read.trajectory)), note=NOTE
        )


def _timed(turns: list[TurnTrace], steps: list[_Step]) -> Iterator[TurnTrace]:
    """Each turn after the first answers the tool of the step before it, and waited for it if its time is known."""
    yield turns[0]
    for index, turn in enumerate(turns[1:], 1):
        took_s = steps[index - 1].execution_time if len(steps) >= len(turns) - 1 else None
        yield replace(turn, kind=TurnKind.TOOL, gap_ms=None if took_s is None else round(took_s * 1e3, 3))
