"""Reads LMCache agent sessions: real text with arrival times, one JSON line a request.

Two shapes occur. A transcript (`user: ...`, `assistant: ...`) holds every role and becomes messages as it stands. A
plain input holds only what the user side said, so far, in one text: each next input repeats it and adds an observation;
the answers between were left out by the recorder and are put back from the recorded outputs.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from trunkline.wire.traces import Message, MessagesPrompt, RunTrace, TraceError, TurnTrace, read_lines, trace_files

_ROLE = re.compile(r"(?:\A|\n\n)(user|assistant|system): ")


class _Request(msgspec.Struct):
    """One request. `timestamp` is the arrival in microseconds."""

    timestamp: int
    input: str
    output: str
    session_id: str


_decode = msgspec.json.Decoder(_Request).decode


def read_lmcache(path: Path) -> Iterator[RunTrace]:
    """Runs of a file, or of every trace file in a folder; a session's lines lie together. Raises `TraceError`.

    Requests are put in order of arrival. Those without any text (an image, in these corpora) are left out.
    """
    for file in trace_files(path, ".jsonl"):
        seen: set[str] = set()
        for session, group in groupby(_read(file), key=lambda numbered: numbered[1].session_id):
            first, *rest = group
            if session in seen:
                raise TraceError(file, first[0], f"session {session!r} goes on here; sort the file by session_id")
            seen.add(session)
            requests = sorted((request for _, request in (first, *rest)), key=lambda request: request.timestamp)
            if texts := [request for request in requests if request.input]:
                yield _run(session, texts)


def _read(path: Path) -> Iterator[tuple[int, _Request]]:
    for number, line in read_lines(path):
        try:
            yield number, _decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(path, number, f"not an LMCache request: {error}") from error


def _run(session: str, requests: Sequence[_Request]) -> RunTrace:
    history: list[Message] = []
    turns: list[TurnTrace] = []
    before: _Request | None = None
    for request in requests:
        messages = _messages(request.input, history, before)
        keep = 0
        while keep < min(len(history), len(messages)) and history[keep] == messages[keep]:
            keep += 1
        turns.append(
            TurnTrace(
                prompt=MessagesPrompt(keep=keep, add=tuple(messages[keep:])),
                output=request.output,
                at_ms=round((request.timestamp - requests[0].timestamp) / 1e3, 3),
            )
        )
        history, before = messages, request
    return RunTrace(id=session, source="lmcache", begin_ms=requests[0].timestamp / 1e3, turns=tuple(turns))


def _messages(text: str, history: Sequence[Message], before: _Request | None) -> list[Message]:
    """`text` as messages. `history` and `before` are the previous prompt's messages and its request."""
    if _ROLE.match(text):
        _, *parts = _ROLE.split(text)
        return [Message(role, content) for role, content in zip(parts[::2], parts[1::2], strict=True)]
    if before is not None and text.startswith(before.input):
        said = text[len(before.input) :].removeprefix("\n\n")
        return [*history, Message("assistant", before.output), *([Message("user", said)] if said else [])]
    return [Message("user", text)]
