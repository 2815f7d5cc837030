"""Run records: durable when promised, bounded, locked, readable beside a live writer."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import msgspec
import pytest

from tests.gateway.scripted import make_row
from trunkline.core.types import RunKey
from trunkline.gateway.records import RunRecords
from trunkline.gateway.rundb import SCHEMA, DamagedRecords, DataDirLocked, NewerSchema, open_reader
from trunkline.wire.records import DiffRow, MissRow

T = TypeVar("T")


def done(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.fixture(params=["file", "memory"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunRecords]:
    opened = RunRecords(tmp_path / "runs.sqlite" if request.param == "file" else None)
    yield opened
    opened.close()


def test_a_turn_is_visible_once_committed_returns(records: RunRecords) -> None:
    row = make_row(
        misses=(MissRow(reason="evicted", tokens=6, detail="decision 3"),),
        tool_gap_ms=12.5,
        normalized={"dates": 2},
        constraint="tool_call",
        forced_tokens=12,
        saved_passes=11,
        mask_ms=0.75,
    )
    text = {"before": "cch=", "was": "1f3a9", "now": "22bcd", "after": ";\n"}
    diff = DiffRow(run="run-b", at_token=7, was_tokens=20, now_tokens=30, culprit="billing", **text)
    row = msgspec.structs.replace(row, diff=diff)
    records.turn("", "run-a", None, "header", row)
    done(records.committed())
    view = records.run("", "run-a")
    assert view is not None
    assert view.turns == (row,)
    assert (view.state, view.origin, view.parent, view.node) == ("waiting", "header", None, "engine")
    assert (view.totals.turns, view.totals.prompt_tokens, view.totals.cached_tokens) == (1, 10, 4)


def test_totals_are_the_sums_of_the_turns(records: RunRecords) -> None:
    for index in range(3):
        records.turn("", "r", None, "header", make_row(index=index, completion_tokens=index, cost_usd=0.25))
    done(records.committed())
    (row,) = records.runs("", limit=10)
    assert (row.turns, row.prompt_tokens, row.completion_tokens, row.cost_usd) == (3, 30, 3, 0.75)


def test_turns_from_many_threads_are_all_kept(records: RunRecords) -> None:
    def write(run: str) -> None:
        for index in range(50):
            records.turn("", run, None, "header", make_row(index=index))

    threads = [Thread(target=write, args=(f"r{at}",)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done(records.committed())
    views = [records.run("", f"r{at}") for at in range(4)]
    assert [[turn.index for turn in view.turns] for view in views if view] == [list(range(50))] * 4


def test_a_declared_run_is_listed_before_its_first_turn_and_cannot_be_declared_twice(records: RunRecords) -> None:
    key = RunKey("", "r")
    assert done(records.declare(key, parent="p", name="fix", objective="make it pass", expected_turns=9))
    assert not done(records.declare(key, name="other"))
    view = records.run("", "r")
    assert view is not None
    assert (view.name, view.objective, view.expected_turns, view.parent) == ("fix", "make it pass", 9, "p")
    assert view.turns == ()


def test_a_run_knows_its_branches(records: RunRecords) -> None:
    records.turn("", "parent", None, "header", make_row())
    records.turn("", "b1", "parent", "inferred", make_row())
    records.turn("", "b2", "parent", "inferred", make_row())
    done(records.committed())
    view = records.run("", "parent")
    assert view is not None
    assert view.children == ("b1", "b2")


def test_a_finished_run_opens_again_when_a_turn_begins(records: RunRecords) -> None:
    key = RunKey("", "r")

    async def state() -> str:
        await records.committed()
        return records.runs("", 1)[0].state

    records.turn("", "r", None, "header", make_row())
    assert done(state()) == "waiting"
    records.finish(key)
    assert done(state()) == "finished"
    records.begin(key, None, "header")
    assert done(state()) == "waiting"


def test_scopes_do_not_see_each_other_and_salts_of_one_scope_do(records: RunRecords) -> None:
    for salt in ("a", "a/salted", "b"):
        records.turn(salt, f"run-of-{salt}", None, "header", make_row())
    done(records.committed())
    assert [row.id for row in records.runs("a", 10)] == ["run-of-a/salted", "run-of-a"]
    assert records.run("b", "run-of-a") is None
    assert records.locate("a", "run-of-a/salted") == RunKey("a/salted", "run-of-a/salted")
    assert len(records.runs(None, 10)) == 3


def test_lists_page_from_newest_to_oldest(records: RunRecords) -> None:
    for at in range(5):
        records.turn("", f"r{at}", None, "header", make_row())
    done(records.committed())
    pages = [[row.id for row in records.runs("", 2, before)] for before in (None, "r3", "r1", "r0", "unknown")]
    assert pages == [["r4", "r3"], ["r2", "r1"], ["r0"], [], []]


def test_open_runs_are_those_not_finished_with_their_last_prompt(records: RunRecords) -> None:
    records.turn("s", "open", "p", "header", make_row(prompt_tokens=10))
    records.begin(RunKey("s", "open"), "p", "header", "session")
    records.turn("s", "open", "p", "header", make_row(index=1, prompt_tokens=70, prompt_digest="70-0f"))
    records.turn("s", "over", None, "header", make_row())
    records.finish(RunKey("s", "over"))
    done(records.committed())
    (run,) = records.all_open_runs()
    assert (run.salt, run.run, run.parent, run.turns, run.prompt_tokens) == ("s", "open", "p", 2, 70)
    assert (run.origin, run.session, run.digest) == ("header", "session", "70-0f")


def test_beyond_the_bound_finished_runs_go_first_then_the_longest_idle() -> None:
    records = RunRecords(None, max_runs=4)
    for at in range(4):
        records.turn("", f"r{at}", None, "header", make_row(at=float(at)))
    records.finish(RunKey("", "r3"))
    records.turn("", "r4", None, "header", make_row(at=4.0))
    done(records.committed())
    assert {row.id for row in records.runs("", 10)} == {"r0", "r1", "r2", "r4"}
    records.turn("", "r5", None, "header", make_row(at=5.0))
    done(records.committed())
    assert {row.id for row in records.runs("", 10)} == {"r1", "r2", "r4", "r5"}
    records.turn("", "r0", None, "header", make_row(at=6.0))  # a pruned run may come back
    done(records.committed())
    assert {row.id for row in records.runs("", 10)} == {"r2", "r4", "r5", "r0"}
    records.close()


def test_observers_see_every_turn_even_if_one_of_them_fails(
    records: RunRecords, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(row: object) -> None:
        raise RuntimeError("observer broke")

    seen: list[object] = []
    records.subscribe(fail)
    records.subscribe(seen.append)
    records.turn("", "r", None, "header", make_row())
    done(records.committed())
    assert len(seen) == 1
    assert "observer" in caplog.text


def test_a_failed_write_is_counted_and_later_writes_still_work(
    records: RunRecords, caplog: pytest.LogCaptureFixture
) -> None:
    records.turn("", "r", None, "header", make_row(prompt_tokens=2**70))  # more than SQLite's integers hold
    done(records.committed())
    assert records.lost == 1
    assert "lost" in caplog.text
    records.turn("", "r", None, "header", make_row())
    done(records.committed())
    view = records.run("", "r")
    assert view is not None
    assert len(view.turns) == 1


def test_records_survive_closing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.sqlite"
    first = RunRecords(path)
    first.turn("", "r", None, "header", make_row())
    first.close()
    second = RunRecords(path)
    assert [row.id for row in second.runs("", 10)] == ["r"]
    second.close()


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.gateway.scripted import make_row
from trunkline.gateway.records import RunRecords

async def main():
    records = RunRecords(Path(sys.argv[1]))
    for index in range(20):
        records.turn("", "r", None, "header", make_row(index=index))
    await records.committed()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_what_was_committed_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    records = RunRecords(path)
    view = records.run("", "r")
    records.close()
    assert view is not None
    assert len(view.turns) == 20


def test_a_data_dir_in_use_is_refused_and_free_again_after_closing(tmp_path: Path) -> None:
    first = RunRecords(tmp_path / "runs.sqlite")
    with pytest.raises(DataDirLocked, match=rf"process {os.getpid()}.*another --data-dir"):
        RunRecords(tmp_path / "runs.sqlite")
    first.close()
    RunRecords(tmp_path / "runs.sqlite").close()


def test_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    RunRecords(path).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE schema SET version = 99")
    connection.commit()
    connection.close()
    with pytest.raises(NewerSchema, match=r"schema 99.*upgrade"):
        RunRecords(path)
    with pytest.raises(NewerSchema):
        open_reader(path)


def test_records_of_the_first_version_are_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(f"{SCHEMA} INSERT INTO schema VALUES (1);")
    connection.execute("INSERT INTO runs (salt, id, scope, origin, started_at, last_at) VALUES ('', 'r', '', '', 0, 0)")
    old = make_row()
    filled = {name: getattr(old, name) for name in old.__struct_fields__} | {"misses": b"[]"}
    columns = [row[1] for row in connection.execute("PRAGMA table_info (turns)") if row[1] not in ("seq", "run")]
    names, marks = ", ".join(f'"{name}"' for name in columns), ", ?" * len(columns)
    connection.execute(f"INSERT INTO turns (run, {names}) VALUES (1{marks})", [filled[name] for name in columns])
    connection.commit()
    connection.close()

    reader = open_reader(path)
    before = reader.run("", "r")
    reader.close()
    records = RunRecords(path)
    new = make_row(index=1, normalized={"billing": 1}, constraint="json_schema", forced_tokens=2)
    records.turn("", "r", None, "header", new)
    done(records.committed())
    after = records.run("", "r")
    records.close()
    assert before is not None and after is not None
    assert [turn.normalized for turn in before.turns] == [{}]
    assert [(turn.index, turn.normalized) for turn in after.turns] == [(0, {}), (1, {"billing": 1})]
    assert [(turn.constraint, turn.forced_tokens) for turn in after.turns] == [(None, 0), ("json_schema", 2)]
    RunRecords(path).close()  # and what was brought up to date opens again


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    path.write_text("this is not a database, but somebody's notes" * 100)
    with pytest.raises(DamagedRecords, match="move it away"):
        RunRecords(path)
    assert path.read_text().startswith("this is not")


def test_a_reader_works_beside_a_live_writer_and_after_it(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    with pytest.raises(FileNotFoundError, match="no server has kept records"):
        open_reader(path)
    records = RunRecords(path)
    reader = open_reader(path)
    records.turn("", "r", None, "header", make_row())
    done(records.committed())
    assert [row.id for row in reader.runs(None, 10)] == ["r"]
    reader.close()
    records.close()
    late = open_reader(path)
    assert late.run(None, "r") is not None
    late.close()
