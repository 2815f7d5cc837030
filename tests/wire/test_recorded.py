"""Run traces made of run records: with an endless cache they reuse exactly what the server could have reused."""

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.types import Ints
from trunkline.wire.recorded import read_records, runs_of_records
from trunkline.wire.records import RunView, TurnRow
from trunkline.wire.symbols import SymbolTable
from trunkline.wire.traces import Fork, RunTrace, TraceError, read_runs, read_sessions, write_runs


def row(index: int, at: float, prompt: int, reusable: int, out: int, gap: float | None = 1000.0) -> TurnRow:
    return TurnRow(
        index=index,
        at=at,
        node="local",
        prompt_tokens=prompt,
        cached_tokens=reusable,
        novel_tokens=prompt - reusable,
        reusable_tokens=reusable,
        completion_tokens=out,
        misses=(),
        queue_ms=100.0,
        prefill_ms=300.0,
        decode_ms=600.0,
        latency_ms=1000.0,
        tool_gap_ms=gap if index else None,
        finish_reason="stop",
    )


def view(name: str, *turns: TurnRow, parent: str | None = None) -> RunView:
    return RunView(
        id=name,
        parent=parent,
        children=(),
        state="waiting",
        origin="header",
        node="local",
        started_at=turns[0].at if turns else 0.0,
        last_at=turns[-1].at if turns else 0.0,
        turns=turns,
    )


def reusable(runs: list[RunTrace]) -> dict[str, list[int]]:
    """What an endless cache would reuse of each prompt: the longest prefix that arrived before, less the last token."""
    arrived: list[Ints] = []
    found: dict[str, list[int]] = {}
    table = SymbolTable()
    for session in read_sessions(runs):
        opened = table.session(session)
        for _, name in sorted((turn.at_ms or 0.0, run.id) for run in session for turn in run.turns):
            turn = next(opened[name])
            prompt = turn.prompt.symbols
            assert turn.prompt.tokens == len(prompt)
            reach = max((_common(prompt, old) for old in arrived), default=0)
            found.setdefault(name, []).append(min(reach, len(prompt) - 1))
            arrived.append(np.concatenate((prompt, turn.answer[:-1])))
    return found


def _common(a: Ints, b: Ints) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.integers(1, 30), st.integers(0, 20), st.booleans()), min_size=1, max_size=8
    )
)
def test_a_derived_run_reuses_what_was_recorded(steps: list[tuple[int, int, int, bool]]) -> None:
    rows: list[TurnRow] = []
    for index, (cut, new, out, whole) in enumerate(steps):
        before = rows[-1] if rows else None
        length = before.prompt_tokens + max(0, before.completion_tokens - 1) if before else 0
        shared = length if whole else min(cut, length)
        repeated = bool(before and whole and before.completion_tokens)  # its last token was not in the tree
        prompt = shared + repeated + new
        rows.append(row(index, 10.0 * index, prompt, min(shared, prompt - 1), out))
    (run,) = runs_of_records([view("r", *rows)])
    assert [turn.output_tokens for turn in run.turns] == [each.completion_tokens for each in rows]
    derived = reusable([run])["r"]
    for want, got in zip(rows, derived, strict=True):
        # one token may be told two ways: a last token is never reusable, even where the prompt repeats it
        assert want.reusable_tokens <= got <= want.reusable_tokens + 1


def test_continuing_edited_and_compacted_turns_keep_what_was_recorded() -> None:
    turns = (
        row(0, 0, 100, 0, 10),
        row(1, 2, 150, 109, 20),
        row(2, 4, 180, 60, 5),  # edited at token 60
        row(3, 6, 40, 25, 5),  # rewritten shorter
    )
    (run,) = runs_of_records([view("r", *turns)])
    assert reusable([run])["r"] == [0, 109, 60, 25]
    assert [turn.prompt.keep for turn in run.turns] == [0, 100, 60, 25]
    assert [run.prompt_tokens(index) for index in range(4)] == [100, 150, 180, 40]


def test_roots_share_the_head_that_they_could_reuse() -> None:
    views = [view(name, row(0, at, 100, head, 5)) for name, at, head in (("a", 0, 0), ("b", 5, 40), ("c", 9, 99))]
    runs = list(runs_of_records(reversed(views)))
    assert [run.id for run in runs] == ["a", "b", "c"]
    assert reusable(runs) == {"a": [0], "b": [40], "c": [99]}
    assert [run.begin_ms for run in runs] == [0.0, 5000.0, 9000.0]


def test_a_branch_forks_and_joins_where_the_times_say() -> None:
    parent = view("p", row(0, 0, 100, 0, 10), row(1, 10, 200, 110, 10, gap=9000.0), row(2, 12, 220, 209, 10))
    branch = view("b", row(0, 2, 120, 109, 10), row(1, 5, 140, 129, 10), parent="p")
    late = view("late", row(0, 20, 150, 100, 4), parent="p")
    root, *others = runs_of_records([late, branch, parent])
    assert root.fork is None
    assert [run.fork for run in others] == [Fork(parent="p", after=1, joins=1), Fork(parent="p", after=3)]
    # the parent's 9 s gap held the branch, which ended 4 s before its next turn
    assert [turn.gap_ms for turn in root.turns] == [None, 4000.0, 1000.0]
    assert reusable([root, *others]) == {"p": [0, 110, 209], "b": [109, 129], "late": [100]}


def test_a_branch_of_a_forgotten_parent_is_a_root_and_a_run_without_turns_is_left_out() -> None:
    runs = list(runs_of_records([view("b", row(0, 2, 9, 0, 1), parent="gone"), view("declared")]))
    assert [(run.id, run.fork) for run in runs] == [("b", None)]
    assert list(runs_of_records([])) == []


def test_records_become_a_trace_file_that_keeps_them(tmp_path: Path) -> None:
    rows = row(0, 0, 100, 0, 10), row(1, 2, 150, 109, 20)
    runs = list(runs_of_records([view("r", *rows)]))
    write_runs(tmp_path / "r.jsonl", runs)
    (again,) = read_runs(tmp_path / "r.jsonl")
    assert again == runs[0]
    assert tuple(turn.result for turn in again.turns) == rows


@pytest.mark.parametrize("indent", [0, 2])
def test_records_are_read_as_the_api_and_the_command_print_them(tmp_path: Path, indent: int) -> None:
    views = [view("a", row(0, 0, 10, 0, 1)), view("b", row(0, 1, 10, 0, 1))]
    text = b"\n".join(msgspec.json.format(msgspec.json.encode(each), indent=indent) for each in views)
    (tmp_path / "v.json").write_bytes(text)
    assert [run.id for run in read_records(tmp_path / "v.json")] == ["a", "b"]


def test_a_bad_record_is_named_by_its_line(tmp_path: Path) -> None:
    good = msgspec.json.encode(view("a", row(0, 0, 10, 0, 1)))
    (tmp_path / "v.json").write_bytes(good + b'\n{"id": 3}\n')
    with pytest.raises(TraceError, match="not the record of a run") as caught:
        list(read_records(tmp_path / "v.json"))
    assert caught.value.line == 2


def test_ids_of_different_turns_never_meet_by_chance() -> None:
    turns = [row(index, 3.0 * index, 50, 0, 7) for index in range(4)]
    (run,) = runs_of_records([view("r", *turns)])
    spans = [span for turn in run.turns for span in (*getattr(turn.prompt, "add", ()), *turn.output_ids)]
    for (first, count), (other, more) in itertools.combinations(spans, 2):
        assert first + count <= other or other + more <= first
