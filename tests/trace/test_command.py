"""`trunkline trace`: through the command line, on small files."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from trunkline import cli
from trunkline.core.types import RunKey
from trunkline.gateway.records import RunRecords
from trunkline.trace import progress
from trunkline.wire.records import TurnRow
from trunkline.wire.traces import (
    BlocksPrompt,
    Fork,
    Message,
    MessagesPrompt,
    RunTrace,
    TurnTrace,
    read_runs,
    write_runs,
)


def blocks(keep: int, first: int, count: int, tail: int = 0, out: int = 100, gap: float | None = None) -> TurnTrace:
    prompt = BlocksPrompt(keep=keep, add=((first, count),), tail_tokens=tail)
    return TurnTrace(prompt=prompt, output_tokens=out, gap_ms=gap, at_ms=1.0)


ROOT = RunTrace(id="a", block_tokens=64, begin_ms=0.0, turns=(blocks(0, 1, 4, 32), blocks(4, 5, 2, gap=90_000.0)))
CHILD = RunTrace(id="a/c", block_tokens=64, fork=Fork(parent="a", after=1, joins=1), turns=(blocks(2, 20, 1),))
OTHER = RunTrace(id="b", block_tokens=64, begin_ms=60_000.0, turns=(blocks(0, 1, 40),))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.jsonl"
    write_runs(path, [ROOT, CHILD, OTHER])
    return path


def trace(*arguments: object) -> int:
    return cli.main(["trace", *map(str, arguments)])


def test_import_writes_any_format_as_run_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = {"t": 0, "type": "n", "in": 70, "out": 1, "keep": 0, "add": [[1, 1]]}
    (tmp_path / "w.json").write_text(json.dumps({"id": "s", "block_size": 64, "requests": [request]}, indent=1))
    assert trace("import", tmp_path / "w.json", "--out", tmp_path / "r.jsonl.gz") == 0
    (run,) = read_runs(tmp_path / "r.jsonl.gz")
    assert (run.id, run.source, run.prompt_tokens(0)) == ("s", "weka", 70)
    assert "wrote 1 sessions, 1 runs, 1 turns" in capsys.readouterr().err


def test_without_out_runs_are_printed(source: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert trace("import", source) == 0
    assert capfdbinary.readouterr().out == source.read_bytes()


def test_stats_tell_what_is_in_a_trace(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace("stats", source, "--json") == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {key: figures[key] for key in ("sessions", "runs", "sub_agents", "turns", "compactions")} == {
        "sessions": 2,
        "runs": 3,
        "sub_agents": 1,
        "turns": 4,
        "compactions": 0,
    }
    assert figures["total_input_tokens"] == 288 + 384 + 192 + 2560
    assert figures["infinite_cache_hit"] == pytest.approx((256 + 128) / 3424)
    assert figures["gap_unknown_kind_s"]["p50"] == 90
    assert trace("stats", source) == 0
    shown = capsys.readouterr().out
    assert "2 with 4 turns" in shown
    assert "infinite cache would hit 11.2%" in shown


def test_scale_divides_sizes_and_caps_waits(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.jsonl"
    assert trace("scale", source, "--by", 16, "--output-by", 8, "--gap-cap", 2, "--out", out) == 0
    root, child, _ = read_runs(out)
    assert [root.prompt_tokens(index) for index in range(2)] == [18, 24]
    assert [turn.output_tokens for turn in root.turns] == [12, 12]
    assert [turn.gap_ms for turn in root.turns] == [None, 2000.0]
    assert child.fork == CHILD.fork


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        (["--first", 1], ["a", "a/c"]),
        (["--id", "b"], ["b"]),
        (["--from", 60], ["b"]),
        (["--until", 60], ["a", "a/c"]),
        (["--max-context", 500], ["a", "a/c"]),
        (["--max-context", 2660], ["a", "a/c", "b"]),
        (["--max-context", 2660, "--from", 1, "--first", 3], ["b"]),
    ],
)
def test_slice_keeps_whole_sessions(source: Path, tmp_path: Path, filters: list[object], left: list[str]) -> None:
    assert trace("slice", source, *filters, "--out", tmp_path / "some.jsonl") == 0
    assert [run.id for run in read_runs(tmp_path / "some.jsonl")] == left


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["scale", "SRC", "--by", 3], "cannot divide a block of 64 tokens by 3"),
        (["slice", "SRC", "--id", "nobody"], "no session is left"),
        (["slice", "TEXT", "--max-context", 9], "its length in tokens depends on the model"),
        (["slice", "TEXT", "--from", 9], "does not say when it began"),
        (["stats", "NONE"], "no such file"),
        (["import", "SRC", "--format", "weka"], "source.jsonl:1: not a Weka session"),
        (["export", "--data-dir", "NONE"], "does not exist"),
        (["import", "SRC", "--out", "NONE/x"], "No such file"),
    ],
)
def test_what_cannot_be_done_is_said_and_leaves_no_file(
    source: Path, tmp_path: Path, arguments: list[object], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.jsonl"
    chat = MessagesPrompt(add=(Message("user", "hi"),))
    write_runs(text, [RunTrace(id="t", turns=(TurnTrace(prompt=chat),))])
    names = {"SRC": source, "TEXT": text, "NONE": tmp_path / "none", "NONE/x": tmp_path / "none" / "x"}
    given = [names.get(str(argument), argument) for argument in arguments]
    before = sorted(tmp_path.iterdir())
    if arguments[0] != "stats" and "--out" not in arguments:
        given += ["--out", tmp_path / "out.jsonl"]
    assert trace(*given) == 1
    assert problem in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_may_be_rewritten_in_place(source: Path) -> None:
    assert trace("slice", source, "--first", 1, "--out", source) == 0
    assert [run.id for run in read_runs(source)] == ["a", "a/c"]


def row(index: int, at: float, prompt: int, reusable: int) -> TurnRow:
    return TurnRow(
        index=index,
        at=at,
        node="local",
        prompt_tokens=prompt,
        cached_tokens=reusable,
        novel_tokens=prompt - reusable,
        reusable_tokens=reusable,
        completion_tokens=10,
        misses=(),
        queue_ms=0.0,
        prefill_ms=1.0,
        decode_ms=1.0,
        latency_ms=2.0,
        tool_gap_ms=1.0 if index else None,
        finish_reason="stop",
    )


def test_what_a_server_recorded_is_exported_and_can_be_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = RunRecords(tmp_path / "runs.sqlite")
    for index, (prompt, reusable) in enumerate(((100, 0), (150, 109), (200, 159))):
        records.turn("", "first", None, "header", row(index, 10.0 + index, prompt, reusable))
    records.turn("", "branch", "first", "header", row(0, 11.5, 170, 159))
    asyncio.run(records.committed())
    assert records.locate(None, "branch") == RunKey("", "branch")
    records.close()
    assert trace("export", "--data-dir", tmp_path, "--out", tmp_path / "mine.jsonl") == 0
    root, branch = read_runs(tmp_path / "mine.jsonl")
    assert [turn.prompt.keep for turn in root.turns] == [0, 100, 150]
    assert branch.fork == Fork(parent="first", after=2, joins=2)
    assert root.turns[1].result == row(1, 11.0, 150, 109)
    capsys.readouterr()
    assert trace("stats", tmp_path / "mine.jsonl") == 0
    assert "sub-agents   1 in 1 sessions" in capsys.readouterr().out


def test_a_long_read_shows_how_far_it_is(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    assert trace("stats", source) == 0
    assert "2 sessions, 4 turns, 0 s" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["import", "stats", "scale", "slice", "export"])
def test_every_command_explains_itself_and_the_formats(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        trace(command, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "tau_bench" in shown
    assert "usage: trunkline trace" in shown


def test_a_reader_that_has_seen_enough_is_no_error(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    assert trace("stats", source) == 0
    assert capsys.readouterr().err == ""
