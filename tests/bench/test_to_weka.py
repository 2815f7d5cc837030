"""`benchmarks/to_weka.py`: what harnesses replay is what was recorded, only smaller."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trunkline.wire.reshape import scale
from trunkline.wire.traces import RunTrace
from trunkline.wire.weka import read_weka

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "to_weka.py"


def request(t: float, size: int, **blocks: Any) -> dict[str, Any]:
    kinds = {"input_types": ["tool_result"], "output_types": ["tool_use"], "stop": "tool_use"}
    return {"t": t, "type": "n", "model": "m", "in": size, "out": 50, "api_time": 1.0, **kinds, **blocks}


CHILD = {
    "t": 9.0,
    "type": "subagent",
    "agent_id": "agent_001",
    "subagent_type": "Explore",
    "duration_ms": 6000,
    "status": "completed",
    "tool_tokens": 70,
    "requests": [request(0.0, 140, keep=0, add=[[20, 2]]), request(4.0, 130, keep=1, add=[[1, 1]])],
}
DELTA = {
    "id": "a",
    "models": ["m"],
    "block_size": 64,
    "system_tokens": 100,
    "requests": [
        request(0.0, 210, keep=0, add=[[1, 3]]),
        CHILD,
        request(10.0, 335, keep=3, add=[[4, 2]]),
        request(20.0, 150, keep=1, add=[[9, 1]]),
    ],
}
LONG = DELTA | {"id": "long", "requests": [request(0.0, 64_000, keep=0, add=[[1, 1000]])]}


def convert(*arguments: object) -> None:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


def smaller(path: Path) -> list[RunTrace]:
    return [scale(run, 16, 8) for run in read_weka(path)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "delta.jsonl"
    path.write_text("".join(json.dumps(session) + "\n" for session in (LONG, DELTA)))
    return path


def test_a_folder_of_sessions_holds_the_recorded_runs_in_smaller_blocks(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "--max-context", 100)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.json"]
    assert list(read_weka(tmp_path / "out")) == [run for run in smaller(source) if run.id != "long"]


def test_every_request_says_all_its_blocks_and_keeps_its_kinds(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "--id", "a")
    told = json.loads((tmp_path / "out" / "a.json").read_text())
    first, child, second, third = told["requests"]
    assert [turn["hash_ids"] for turn in (first, second, third)] == [[1, 2, 3], [1, 2, 3, 4, 5], [1, 9]]
    assert [turn["hash_ids"] for turn in child["requests"]] == [[20, 21], [20, 1]]
    assert (told["block_size"], told["system_tokens"], child["tool_tokens"]) == (4, 6, 4)
    assert (first["in"], first["out"], first["input_types"], first["stop"]) == (13, 6, ["tool_result"], "tool_use")
    assert not {"keep", "add"} & (first.keys() | child["requests"][0].keys())


def test_lines_and_whole_files_convert_alike(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "lines.jsonl", "--form", "lines", "--by", 1, "--output-by", 1, "--max-context", 100_000)
    (tmp_path / "pretty").mkdir()
    for line in (tmp_path / "lines.jsonl").read_text().splitlines():
        session = json.loads(line)
        (tmp_path / "pretty" / f"{session['id']}.json").write_text(json.dumps(session, indent=1))
    convert(tmp_path / "pretty", tmp_path / "again", "--runs", 1)
    assert list(read_weka(tmp_path / "again")) == [run for run in smaller(source) if run.id != "long"]


def test_requests_come_by_time_and_share_blocks_inside_their_session_only(source: Path, tmp_path: Path) -> None:
    twin = DELTA | {"id": "b", "requests": [request(5.0, 150, keep=0, add=[[1, 2]])]}
    source.write_text("".join(json.dumps(session) + "\n" for session in (DELTA, twin)))
    convert(source, tmp_path / "out.jsonl", "--form", "requests")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["t"], row["in"]) for row in rows] == [(0.0, 13), (5.0, 9), (10.0, 20), (20.0, 9)]
    first, other, second, third = (set(row["hash_ids"]) for row in rows)
    assert first & second & third
    assert not other & (first | second | third)
