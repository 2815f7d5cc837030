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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trunkline.wire.records import RunView, TurnRow
from trunkline.wire.traces import MAX_ID, BlocksPrompt, Fork, RunTrace, TraceError, TurnTrace, open_trace

SPACE = "records"
NOTE = "prompts are derived from recorded lengths: shared heads and joins are assumed (see docs/traces.md)"

Runs = tuple[tuple[int, int], ...]

_VALUE = re.compile(rb"^(?=\{)", re.MULTILINE)
_decode = msgspec.json.Decoder(RunView).decode


def read_records(path: Path) -> Iterator[RunTrace]:
    """Runs of a file that holds what `GET /v1/runs/{id}` or `trunkline run ID --json` gave, one after another."""
    try:
        with open_trace(path) as file:
            values = [value for value in _VALUE.split(file.read()) if value.strip()]
    except (OSError, EOFError) as error:
        raise TraceError(path, None, f"cannot be read: {error}") from error
    line, views = 1, []
    for value in values:
        try:
            views.append(_decode(value))
        except msgspec.MsgspecError as error:
            raise TraceError(path, line, f"not the record of a run: {error}") from error
        line += value.count(b"\n")
    yield from runs_of_records(views)


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
    """Where a run is: the symbols of its latest prompt and answer as id runs, and the lengths of the two."""

    symbols: Runs = ()
    prompt: int = 0
    answer: int = 0


class _Writer:
    """Gives out ids and keeps what later runs may share. `epoch_s` is when the first run began."""

    def __init__(self, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._next = 0
        self._firsts: list[_Trail] = []

    def session(self, root: RunView, children: dict[str, list[RunView]]) -> Iterator[RunTrace]:
        """A root and what was branched from it, parents first."""
        began_s = root.turns[0].at
        yield from self._tree(root, None, [], began_s, children)

    def _tree(
        self,
        view: RunView,
        fork: Fork | None,
        above: Sequence[_Trail],
        began_s: float,
        children: dict[str, list[RunView]],
    ) -> Iterator[RunTrace]:
        below = [(child, _fork(child, view)) for child in children.get(view.id, [])]
        start = above[fork.after] if fork else _Trail()
        trails, turns = [start], []
        for index, row in enumerate(view.turns):
            if index == 0 and fork is None:
                prompt, trail = self._first(row)
            else:
                prompt, trail = self._next_prompt(row, trails[-1], row.reusable_tokens)
            ended = [child.turns[-1] for child, at in below if at.joins == index]
            turns.append(_turn(row, prompt, began_s, _gap_ms(view, index, ended)))
            trails.append(trail)
        yield RunTrace(
            id=view.id,
            source=row.node if view.turns else "",
            fork=fork,
            begin_ms=None if fork else round((began_s - self._epoch_s) * 1e3, 3),
            block_tokens=1,
            space=SPACE,
            turns=tuple(turns),
            note=NOTE,
        )
        for child, at in below:
            yield from self._tree(child, at, trails, began_s, children)

    def _first(self, row: TurnRow) -> tuple[BlocksPrompt, _Trail]:
        """A root's first prompt: its head is that of the latest root that is as long as what could be reused."""
        head = next((old for old in reversed(self._firsts) if old.prompt >= row.reusable_tokens > 0), _Trail())
        shared = _head(head.symbols, min(row.reusable_tokens, head.prompt, row.prompt_tokens))
        prompt, trail = self._next_prompt(row, _Trail(), 0, shared)
        self._firsts.append(_Trail(_head(trail.symbols, trail.prompt), trail.prompt))
        return prompt, trail

    def _next_prompt(self, row: TurnRow, before: _Trail, shared: int, head: Runs = ()) -> tuple[BlocksPrompt, _Trail]:
        """The prompt that keeps `shared` tokens of the trail `before`, or begins with `head`; and the trail after it.

        A last token is never reusable, neither a prompt's nor an answer's: one token short of all means all.
        """
        length = before.prompt + before.answer
        shared = min(shared + (shared in (length - 1, row.prompt_tokens - 1)), length, row.prompt_tokens)
        keep = min(shared, before.prompt)
        answered = _head(_rest(before.symbols, before.prompt), shared - keep)
        added = head + answered
        own = row.prompt_tokens - keep - sum(count for _, count in added)
        added = _joined(added + self._take(own))
        symbols = _joined(_head(before.symbols, keep) + added + self._take(row.completion_tokens))
        return BlocksPrompt(keep=keep, add=added), _Trail(symbols, row.prompt_tokens, row.completion_tokens)

    def _take(self, count: int) -> Runs:
        first, self._next = self._next, self._next + count
        if self._next > MAX_ID:
            raise ValueError("the records hold more tokens than ids can name; export fewer runs")
        return ((first, count),) if count else ()


def _turn(row: TurnRow, prompt: BlocksPrompt, began_s: float, gap_ms: float | None) -> TurnTrace:
    return TurnTrace(
        prompt=prompt,
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


def _rest(runs: Runs, count: int) -> Runs:
    """The ids after the first `count`."""
    left: list[tuple[int, int]] = []
    for first, length in runs:
        if length > count:
            left.append((first + max(0, count), length - max(0, count)))
        count -= length
    return tuple(left)


def _joined(runs: Runs) -> Runs:
    """The same ids, neighbours in one run."""
    joined: list[tuple[int, int]] = []
    for first, length in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((first, length))
    return tuple(joined)
