"""The run trace: one agent run as one JSON line, to be replayed, simulated and recorded. See docs/traces.md.

A trace file is JSON lines, plain or gzip. A sub-agent is a run of its own that names its parent and the place where it
forked; a session (a root run and everything forked from it) lies together in the file, parents before children.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from trunkline.core.types import Ints
from trunkline.wire.records import TurnRow


class TraceError(ValueError):
    """A trace file that cannot be read or made: the file, what is wrong, and the line if it is one's (from 1)."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if line is None else f"{path}:{line}: {problem}")
        self.path, self.line, self.problem = path, line, problem


class _Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Common settings of everything that a trace line holds."""


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call as a model wrote it; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    def body(self) -> dict[str, Any]:
        """As OpenAI's chat API takes it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Message(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One chat message. `content` is plain text; a tool's result names the call that it answers."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def body(self) -> dict[str, Any]:
        """As OpenAI's chat API takes it."""
        body: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            body["tool_calls"] = [call.body() for call in self.tool_calls]
        if self.tool_call_id:
            body["tool_call_id"] = self.tool_call_id
        if self.name:
            body["name"] = self.name
        return body


class Tool(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tool that a run's model may call; `parameters` is its JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}

    def body(self) -> dict[str, Any]:
        """As OpenAI's chat API takes it."""
        return {"type": "function", "function": msgspec.to_builtins(self) | {"parameters": self.parameters}}


class MessagesPrompt(_Row, frozen=True, tag="messages"):
    """A chat prompt: the first `keep` messages of the previous prompt, then `add`."""

    keep: int = 0
    add: tuple[Message, ...] = ()


class TokensPrompt(_Row, frozen=True, tag="tokens"):
    """A prompt of token ids: the first `keep` ids of the previous prompt, then `add`."""

    keep: int = 0
    add: tuple[int, ...] = ()


class BlocksPrompt(_Row, frozen=True, tag="blocks"):
    """A prompt known only by block ids: the first `keep` ids of the previous prompt, then runs of (first id, count).

    Equal ids in one id space mean equal tokens. `tail_tokens` follow the last whole block; they are like nothing else,
    unless `tail_id` names them: then tails with the same id (and length) are equal.
    """

    keep: int = 0
    add: tuple[tuple[int, int], ...] = ()
    tail_tokens: int = 0
    tail_id: int | None = None


Prompt = MessagesPrompt | TokensPrompt | BlocksPrompt
Symbol = Message | int
"""What a prompt is a sequence of: messages, token ids or block ids."""

MAX_ID = 2**31 - 1
"""Block ids are below this: they fit 32 bits."""


class TurnKind(StrEnum):
    """What a turn answers: new words of a `USER`, or the results of the `TOOL`s that the turn before called."""

    UNKNOWN = "unknown"
    USER = "user"
    TOOL = "tool"


class Fork(_Row, frozen=True):
    """Where a run left its parent: when the parent's first `after` turns had ended.

    The parent's turn number `joins` (counted from 0) waits for this run; None: nobody waits. The first turn's
    `keep` counts symbols of the parent's last prompt before the fork.
    """

    parent: str
    after: int
    joins: int | None = None


class TurnTrace(_Row, frozen=True):
    """One generation. Lengths are tokens of the model that was recorded; None means not known.

    `at_ms` is the arrival since the session began. `gap_ms` is the tool gap: from the end of the run's previous turn
    (and of the sub-agents it waits for) to this arrival. `output` is text and `calls` are the tool calls with it;
    `output_ids` are its tokens as runs of (first id, count), where ids are known and stand for one token each.
    `result` is what a Trunkline node recorded of the turn.
    """

    prompt: Prompt
    kind: TurnKind = TurnKind.UNKNOWN
    output: str | None = None
    calls: tuple[ToolCall, ...] = ()
    output_tokens: int | None = None
    output_ids: tuple[tuple[int, int], ...] = ()
    finish: str = ""
    model: str = ""
    at_ms: float | None = None
    gap_ms: float | None = None
    ttft_ms: float | None = None
    latency_ms: float | None = None
    result: TurnRow | None = None


class RunTrace(_Row, frozen=True, tag_field="format", tag="trunkline.run.1"):
    """One run.

    `kind` says what sort of agent it is. `begin_ms` is when its session began, on a clock that all sessions of the file
    share (roots only). `block_tokens` is the size of a block where prompts are blocks; their ids mean the same in all
    sessions that name the same `space`, and without one in this session alone. `task` names what several runs
    attempted, `reward` how well this one did (1.0: solved). `note` says what a reader had to assume.
    """

    id: str
    turns: tuple[TurnTrace, ...]
    kind: str = "agent"
    source: str = ""
    fork: Fork | None = None
    begin_ms: float | None = None
    block_tokens: int = 0
    space: str = ""
    tools: tuple[Tool, ...] = ()
    task: str = ""
    reward: float | None = None
    note: str = ""

    def prompt_tokens(self, turn: int) -> int:
        """Length in tokens of the prompt of `turn`. Not for text, whose length depends on the model that reads it."""
        prompt = self.turns[turn].prompt
        assert not isinstance(prompt, MessagesPrompt)
        tail_tokens = prompt.tail_tokens if isinstance(prompt, BlocksPrompt) else 0
        return size(prompt) * (self.block_tokens or 1) + tail_tokens


Session = tuple[RunTrace, ...]
"""A root run and everything forked from it, parents before children."""

_decode_run = msgspec.json.Decoder(RunTrace).decode
_encode = msgspec.json.Encoder().encode


UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file may raise: it is not there, it is torn, it is not what it says."""


def trace_files(path: Path, *endings: str) -> list[Path]:
    """`path` itself, or the files of a folder whose names end so (`.gz` after it or not), by name."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.name.removesuffix(".gz").endswith(endings))


def open_trace(path: Path) -> IO[bytes] | gzip.GzipFile:
    """Open a trace file for reading, gzip or plain, whatever its name says."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a trace file that are not blank, with their numbers from 1. Raises `TraceError`."""
    number = 0
    try:
        with open_trace(path) as file:
            for number, line in enumerate(file, 1):
                if stripped := line.strip():
                    yield number, stripped
    except UNREADABLE as error:
        raise TraceError(path, number + 1, f"cannot be read: {error}") from error


def read_runs(path: Path) -> Iterator[RunTrace]:
    """Runs of a file in our own format, or of every such file in a folder, one at a time. Raises `TraceError`."""
    for file in trace_files(path, ".jsonl", ".json"):
        for number, line in read_lines(file):
            try:
                run = _decode_run(line)
            except msgspec.MsgspecError as error:
                raise TraceError(file, number, f"not a run trace: {error}") from error
            if problem := _problem(run):
                raise TraceError(file, number, problem)
            yield run


def write_runs(path: Path, runs: Iterable[RunTrace]) -> int:
    """Write runs, gzip if the name ends in `.gz`; returns how many. The file appears whole or not at all."""
    count = 0
    part = path.with_name(f"{path.name}.part")
    try:
        with gzip.open(part, "wb") if path.suffix == ".gz" else part.open("wb") as file:
            for run in runs:
                file.write(encode_run(run))
                count += 1
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def encode_run(run: RunTrace) -> bytes:
    """A run as a line of a trace file."""
    return _encode(run) + b"\n"


def read_sessions(runs: Iterable[RunTrace]) -> Iterator[Session]:
    """Group runs into sessions as they come. Raises ValueError where a child does not fit its session."""
    session: dict[str, RunTrace] = {}
    for run in runs:
        if run.fork is None:
            if session:
                yield tuple(session.values())
            session = {run.id: run}
        elif run.id in session:
            raise ValueError(f"run {run.id!r} is twice in its session")
        else:
            _check_fork(run, run.fork, session)
            session[run.id] = run
    if session:
        yield tuple(session.values())


def _check_fork(run: RunTrace, fork: Fork, session: Mapping[str, RunTrace]) -> None:
    """Raise ValueError unless `run` fits the runs of its session that came before it."""
    parent = session.get(fork.parent)
    if parent is None:
        raise ValueError(f"run {run.id!r} names parent {fork.parent!r}, which its session did not bring before")
    joins = len(parent.turns) if fork.joins is None else fork.joins
    if not 0 <= fork.after <= joins <= len(parent.turns):
        raise ValueError(f"run {run.id!r} forks after {fork.after} and joins at {joins} of {len(parent.turns)}")
    keep = run.turns[0].prompt.keep if run.turns else 0
    while not fork.after and (above := parent.fork) is not None:  # it starts where its parent started
        parent, fork = session[above.parent], above
    left = parent.turns[fork.after - 1].prompt if fork.after else None
    held = 0 if left is None else size(left)
    if keep > held or (keep and left is not None and type(left) is not type(run.turns[0].prompt)):
        raise ValueError(f"run {run.id!r} keeps {keep} of the {held} symbols of the prompt that it forks from")


def expand(run: RunTrace, inherited: Sequence[Symbol] = ()) -> Iterator[list[Symbol]]:
    """The whole prompt of each turn in turn. `inherited` is the parent's last prompt before the fork."""
    symbols: list[Symbol] = list(inherited)
    for turn in run.turns:
        symbols = symbols[: turn.prompt.keep] + added(turn.prompt)
        yield symbols


def expand_session(session: Session) -> dict[str, list[list[Symbol]]]:
    """The whole prompts of every run of a session, by run id."""
    starts: dict[str, list[Symbol]] = {}
    prompts: dict[str, list[list[Symbol]]] = {}
    for run in session:
        at = run.fork
        starts[run.id] = [] if at is None else prompts[at.parent][at.after - 1] if at.after else starts[at.parent]
        prompts[run.id] = list(expand(run, starts[run.id]))
    return prompts


def added(prompt: Prompt) -> list[Symbol]:
    """The symbols that a prompt brings after the kept ones."""
    return list(spread(prompt.add)) if isinstance(prompt, BlocksPrompt) else list(prompt.add)


def spread(runs: Iterable[tuple[int, int]]) -> Iterator[int]:
    """The ids of runs of (first, count), one by one."""
    return (number for first, count in runs for number in range(first, first + count))


def id_runs(ids: Sequence[int] | Ints) -> list[tuple[int, int]]:
    """Ids as runs of (first, count), as `BlocksPrompt.add` holds them."""
    array = np.asarray(ids, np.int64)
    if not len(array):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(array) != 1) + 1))
    return list(zip(array[starts].tolist(), np.diff(starts, append=len(array)).tolist(), strict=True))


def size(prompt: Prompt) -> int:
    """How many symbols a prompt has, the kept ones included."""
    return prompt.keep + (count_ids(prompt.add) if isinstance(prompt, BlocksPrompt) else len(prompt.add))


def count_ids(runs: Iterable[tuple[int, int]]) -> int:
    """How many ids runs of (first, count) hold."""
    return sum(count for _, count in runs)


def _problem(run: RunTrace) -> str | None:
    """What is wrong inside one run, or None. What spans runs is checked by `read_sessions`."""
    held = None if run.fork else 0
    kind = type(run.turns[0].prompt) if run.turns else None
    if kind is BlocksPrompt and run.block_tokens < 1:
        return "prompts are blocks, so `block_tokens` must say how many tokens a block holds"
    for index, turn in enumerate(run.turns):
        prompt = turn.prompt
        if type(prompt) is not kind:
            return f"turn {index} changes the kind of prompt; a run is all messages, all tokens or all blocks"
        if prompt.keep < 0 or (held is not None and prompt.keep > held):
            return f"turn {index} keeps {prompt.keep} of the {held} symbols before it"
        if isinstance(prompt, BlocksPrompt):
            if any(first < 0 or count < 1 or first + count > MAX_ID for first, count in prompt.add):
                return f"turn {index} adds block ids outside 0 to {MAX_ID} or an empty run of them"
            if prompt.tail_tokens < 0:
                return f"turn {index} has a tail of {prompt.tail_tokens} tokens"
        if turn.output_ids and (run.block_tokens > 1 or count_ids(turn.output_ids) != turn.output_tokens):
            return f"turn {index} has output ids that are not its {turn.output_tokens} output tokens"
        held = size(prompt)
    return None
