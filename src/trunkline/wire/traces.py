"""The run trace: one agent run as one JSON line, to be replayed, simulated and recorded. See docs/traces.md.

A trace file is JSON lines, plain or gzip. A sub-agent is a run of its own that names its parent and the place where it
forked; a session (a root run and everything forked from it) lies together in the file, parents before children.
"""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from trunkline.wire.records import TurnRow


class TraceError(ValueError):
    """A trace file that cannot be read, with the file, the line (counted from 1) and what is wrong there."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.path, self.line, self.problem = path, line, problem


class _Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Common settings of everything that a trace line holds."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message. `content` is plain text."""

    role: str
    content: str


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

    Equal ids in one session mean equal tokens. `tail_tokens` follow the last whole block and are like nothing else.
    """

    keep: int = 0
    add: tuple[tuple[int, int], ...] = ()
    tail_tokens: int = 0


Prompt = MessagesPrompt | TokensPrompt | BlocksPrompt
Symbol = Message | int
"""What a prompt is a sequence of: messages, token ids or block ids."""


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
    (and of the sub-agents it waits for) to this arrival. `result` is what a Trunkline node recorded of the turn.
    """

    prompt: Prompt
    output: str | None = None
    output_tokens: int | None = None
    finish: str = ""
    model: str = ""
    at_ms: float | None = None
    gap_ms: float | None = None
    ttft_ms: float | None = None
    latency_ms: float | None = None
    result: TurnRow | None = None


class RunTrace(_Row, frozen=True, tag_field="format", tag="trunkline.run.1"):
    """One run. `kind` says what sort of agent it is; `block_tokens` is the size of a block where prompts are blocks."""

    id: str
    turns: tuple[TurnTrace, ...]
    kind: str = "agent"
    source: str = ""
    fork: Fork | None = None
    block_tokens: int = 0

    def prompt_tokens(self, turn: int, symbols: Sequence[Symbol]) -> int:
        """Length in tokens of `symbols`, the expanded prompt of `turn`. Only for token and block prompts."""
        prompt = self.turns[turn].prompt
        assert not isinstance(prompt, MessagesPrompt), "the length of text depends on the model that reads it"
        if isinstance(prompt, TokensPrompt):
            return len(symbols)
        return len(symbols) * self.block_tokens + prompt.tail_tokens


Session = tuple[RunTrace, ...]
"""A root run and everything forked from it, parents before children."""

_decode_run = msgspec.json.Decoder(RunTrace).decode
_encode = msgspec.json.Encoder().encode


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
    except (OSError, EOFError) as error:
        raise TraceError(path, number + 1, f"cannot be read: {error}") from error


def read_runs(path: Path) -> Iterator[RunTrace]:
    """Runs of a file in our own format, one at a time. Raises `TraceError`."""
    for number, line in read_lines(path):
        try:
            run = _decode_run(line)
        except msgspec.MsgspecError as error:
            raise TraceError(path, number, f"not a run trace: {error}") from error
        if problem := _problem(run):
            raise TraceError(path, number, problem)
        yield run


def write_runs(path: Path, runs: Iterable[RunTrace]) -> int:
    """Write runs, gzip if the name ends in `.gz`; returns how many."""
    count = 0
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        for run in runs:
            file.write(_encode(run) + b"\n")
            count += 1
    return count


def read_sessions(runs: Iterable[RunTrace]) -> Iterator[Session]:
    """Group runs into sessions as they come. Raises ValueError where a child does not follow its session's root."""
    session: list[RunTrace] = []
    for run in runs:
        if run.fork is None:
            if session:
                yield tuple(session)
            session = [run]
            continue
        parent = next((known for known in session if known.id == run.fork.parent), None)
        if parent is None:
            raise ValueError(f"run {run.id!r} names parent {run.fork.parent!r}, which its session did not bring before")
        joins = len(parent.turns) if run.fork.joins is None else run.fork.joins
        if not 0 <= run.fork.after <= joins <= len(parent.turns):
            raise ValueError(f"run {run.id!r} forks after {run.fork.after} and joins at {joins} of {len(parent.turns)}")
        session.append(run)
    if session:
        yield tuple(session)


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
    if isinstance(prompt, BlocksPrompt):
        return [block for first, count in prompt.add for block in range(first, first + count)]
    return list(prompt.add)


def scale(run: RunTrace, divisor: int, output_divisor: int | None = None) -> RunTrace:
    """The same run with smaller blocks: block, input and output sizes divided, block ids and so prefixes kept.

    Outputs are divided by `output_divisor` if given. Raises ValueError for prompts that are not blocks and for a
    divisor that does not divide the block.
    """
    if divisor < 1 or run.block_tokens % divisor or not run.block_tokens:
        raise ValueError(f"cannot divide a block of {run.block_tokens} tokens by {divisor}; only block traces scale")
    smaller = output_divisor or divisor

    def shrink(turn: TurnTrace) -> TurnTrace:
        assert isinstance(turn.prompt, BlocksPrompt)
        tail = msgspec.structs.replace(turn.prompt, tail_tokens=turn.prompt.tail_tokens // divisor)
        output = None if turn.output_tokens is None else max(1, turn.output_tokens // smaller)
        return msgspec.structs.replace(turn, prompt=tail, output_tokens=output)

    turns = tuple(shrink(turn) for turn in run.turns)
    return msgspec.structs.replace(run, turns=turns, block_tokens=run.block_tokens // divisor)


def _problem(run: RunTrace) -> str | None:
    """What is wrong inside one run, or None. What spans runs is checked by `read_sessions`."""
    held = None if run.fork else 0
    kind = type(run.turns[0].prompt) if run.turns else None
    for index, turn in enumerate(run.turns):
        prompt = turn.prompt
        if type(prompt) is not kind:
            return f"turn {index} changes the kind of prompt; a run is all messages, all tokens or all blocks"
        if prompt.keep < 0 or (held is not None and prompt.keep > held):
            return f"turn {index} keeps {prompt.keep} of the {held} symbols before it"
        held = prompt.keep + len(added(prompt))
    if kind is BlocksPrompt and run.block_tokens < 1:
        return "prompts are blocks, so `block_tokens` must say how many tokens a block holds"
    return None
