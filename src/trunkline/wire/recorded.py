"""Makes run traces of run records: what a server noted of its runs, without their text.

Records keep lengths, times and how much was shared, not the prompts. What a prompt is made of is derived, token by
token (blocks of one token, all runs in one id space):

    turn 0   [shared with an earlier run's first prompt][own]
    turn 1   [prompt of turn 0][answer of turn 0][own]              where all of it could be reused
             [the part of that that could be reused][own]           where the history was edited, or rewritten shorter
    a branch [its parent's trajectory, as far as it could be reused][own]

`reusable_tokens` tells how far a prompt followed what had arrived before. It does not tell whose prompt that was: a
root's first prompt is taken to follow the latest earlier root that is long enough. Whether a parent waited for a branch
is read from the times: its next turn that came after the branch had ended is taken to have waited.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trunkline.wire.records import RunView, TurnRow
from trunkline.wire.traces import (
    MAX_ID,
    UNREADABLE,
    BlocksPrompt,
    Fork,
    RunTrace,
    TraceError,
    TurnTrace,
    count_ids,
    open_trace,
    trace_files,
)

SPACE = "records"
NOTE = "prompts are derived from recorded lengths: shared heads and joins are assumed (see docs/traces.md)"

Runs = tuple[tuple[int, int], ...]

_VALUE = re.compile(rb"^(?=\{)", re.MULTILINE)
_decode = msgspec.json.Decoder(RunView).decode


def read_records(path: Path) -> Iterator[RunTrace]:
    """Runs of files that hold what `GET /v1/runs/{id}` or `trunkline run ID --json` gave, one after another."""
    yield from runs_of_records(view for file in trace_files(path, ".json", ".jsonl") for view in _views(file))


def _views(file: Path) -> Iterator[RunView]:
    try:
        with open_trace(file) as opened:
            values = [value for value in _VALUE.split(opened.read()) if value.strip()]
    except UNREADABLE as error:
        raise TraceError(file, None, f"cannot be read: {error}") from error
    line = 1
    for value in values:
        try:
            yield _decode(value)
        except msgspec.MsgspecError as error:
            raise TraceError(file, line, f"not the record of a run: {error}") from error
        line += value.count(b"\n")


def runs_of_records(views: Iterable[RunView]) -> Iterator[RunTrace]:
    """Run traces of records, in order of time, sessions together. Runs without turns are left out."""
    known = {view.id: view for view in views if view.turns}
    children: dict[str, list[RunView]] = {}
    roots = []
    for view in sorted(known.values(), key=lambda view: view.turns[0].at):
        if view.parent in known and view.parent != view.id:
            children.setdefault(view.parent, []).append(view)
        else:
            roots.append(view)
    if not roots:
        return
    writer = _Writer(roots[0].turns[0].at)
    for root in roots:
        yield from writer.session(root, children)


@dataclass(slots=True)
class _Trail:
    """Where a run is: the ids of its latest prompt, how many they are, and the ids of its answer."""

    symbols: Runs = ()
    prompt: int = 0
    answer: Runs = ()


class _Writer:
    """Gives out ids and keeps what later runs may share. `epoch_s` is when the first run began."""

    def __init__(self, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._next = 0
        self._firsts: list[_Trail] = []

    def session(self, root: RunView, children: Mapping[str, Sequence[RunView]]) -> Iterator[RunTrace]:
        """A root and what was branched from it, parents first."""
        waiting: list[tuple[RunView, Fork | None, _Trail]] = [(root, None, _Trail())]
        while waiting:
            view, fork, start = waiting.pop()
            below = [(child, _fork(child, view)) for child in children.get(view.id, ())]
            run, trails = self._run(view, fork, start, root.turns[0].at, below)
            yield run
            waiting += [(child, at, trails[at.after]) for child, at in reversed(below)]

    def _run(
        self, view: RunView, fork: Fork | None, start: _Trail, began_s: float, below: Sequence[tuple[RunView, Fork]]
    ) -> tuple[RunTrace, list[_Trail]]:
        """One run that starts from the trail `start`, and its trails: that one, then one a turn."""
        trails, turns = [start], []
        for index, row in enumerate(view.turns):
            if index == 0 and fork is None:
                prompt, trail = self._first(row)
            else:
                prompt, trail = self._next_prompt(row, trails[-1], row.reusable_tokens)
            joined = [child.turns[-1] for child, at in below if at.joins == index]
            turns.append(_turn(row, prompt, trail.answer, began_s, _gap_ms(view, index, joined)))
            trails.append(trail)
        run = RunTrace(
            id=view.id,
            source=view.node,
            fork=fork,
            begin_ms=None if fork else round((began_s - self._epoch_s) * 1e3, 3),
            block_tokens=1,
            space=SPACE,
            turns=tuple(turns),
            note=NOTE,
        )
        return run, trails

    def _first(self, row: TurnRow) -> tuple[BlocksPrompt, _Trail]:
        """A root's first prompt: its head is that of the latest root that is as long as what could be reused."""
        head = next((old for old in reversed(self._firsts) if old.prompt >= row.reusable_tokens > 0), _Trail())
        shared = row.reusable_tokens + (row.reusable_tokens == row.prompt_tokens - 1)
        prompt, trail = self._next_prompt(row, _Trail(), 0, _head(head.symbols, shared))
        self._firsts.append(trail)
        return prompt, trail

    def _next_prompt(self, row: TurnRow, before: _Trail, shared: int, head: Runs = ()) -> tuple[BlocksPrompt, _Trail]:
        """The prompt that keeps `shared` tokens of the trail `before`, or begins with `head`; and the trail after it.

        A last token is never reusable, neither a prompt's nor an answer's: one token short of all means all.
        """
        length = before.prompt + count_ids(before.answer)
        shared = min(shared + (shared in (length - 1, row.prompt_tokens - 1)), length, row.prompt_tokens)
        keep = min(shared, before.prompt)
        added = head + _head(before.answer, shared - keep)
        added = _joined(added + self._take(row.prompt_tokens - keep - count_ids(added)))
        answer = self._take(row.completion_tokens)
        return BlocksPrompt(keep=keep, add=added), _Trail(
            _joined(_head(before.symbols, keep) + added), row.prompt_tokens, answer
        )

    def _take(self, count: int) -> Runs:
        first, self._next = self._next, self._next + count
        if self._next > MAX_ID:
            raise ValueError("the records hold more tokens than ids can name; export fewer runs")
        return ((first, count),) if count else ()


def _turn(row: TurnRow, prompt: BlocksPrompt, answer: Runs, began_s: float, gap_ms: float | None) -> TurnTrace:
    return TurnTrace(
        prompt=prompt,
        output_ids=answer,
        output_tokens=row.completion_tokens,
        finish=row.finish_reason,
        at_ms=round((row.at - began_s) * 1e3, 3),
        gap_ms=gap_ms,
        ttft_ms=row.queue_ms + row.prefill_ms,
        latency_ms=row.latency_ms,
        result=row,
    )


def _fork(child: RunView, parent: RunView) -> Fork:
    """Where a branch left its parent and which turn of the parent waited for it, by the times."""
    begin_s, end_s = child.turns[0].at, _end_s(child.turns[-1])
    after = sum(_end_s(row) <= begin_s for row in parent.turns)
    joins = next((index for index, row in enumerate(parent.turns) if row.at >= end_s), None)
    return Fork(parent=parent.id, after=after, joins=None if joins is None else max(joins, after))


def _gap_ms(view: RunView, index: int, joined: Sequence[TurnRow]) -> float | None:
    """The recorded tool gap, less the time that sub-agents took of it."""
    row = view.turns[index]
    if not joined or row.tool_gap_ms is None:
        return row.tool_gap_ms
    return round(max(0.0, min(row.tool_gap_ms, (row.at - max(map(_end_s, joined))) * 1e3)), 3)


def _end_s(row: TurnRow) -> float:
    return row.at + row.latency_ms / 1e3


def _head(runs: Runs, count: int) -> Runs:
    """The first `count` ids."""
    kept: list[tuple[int, int]] = []
    for first, length in runs:
        if count <= 0:
            break
        kept.append((first, min(length, count)))
        count -= length
    return tuple(kept)


def _joined(runs: Runs) -> Runs:
    """The same ids, neighbours in one run."""
    joined: list[tuple[int, int]] = []
    for first, length in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((first, length))
    return tuple(joined)
