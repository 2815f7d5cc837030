"""Readers of other trace formats, on small files of the same shapes."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trunkline.wire.lmcache import read_lmcache
from trunkline.wire.traces import BlocksPrompt, Fork, Message, TraceError, expand, read_sessions
from trunkline.wire.weka import read_weka


def request(t: float, tokens: int, out: int = 5, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": out, "stop": "tool_use", **more}


def session(*requests: dict[str, Any], name: str = "s") -> dict[str, Any]:
    return {"id": name, "models": ["m"], "block_size": 4, "tool_tokens": 1, "requests": list(requests)}


DELTA = session(
    request(0.0, 13, keep=0, add=[[1, 3]], think_time=0.0, api_time=2.0),
    {
        "t": 9.0,
        "type": "subagent",
        "agent_id": "agent_001",
        "subagent_type": "Explore",
        "duration_ms": 6000,
        "requests": [request(0.0, 8, keep=0, add=[[20, 2]], api_time=1.0), request(4.0, 8, keep=1, add=[[1, 1]])],
    },
    {"t": 3.5, "type": "subagent", "duration_ms": None, "requests": [request(0.0, 4, keep=0, add=[[40, 1]])]},
    request(10.0, 21, keep=3, add=[[4, 2]], think_time=8.0, api_time=1.0, ttft=0.5),
    request(15.0, 9, keep=1, add=[[9, 1]]),
)
FULL = session(
    request(0.0, 13, hash_ids=[1, 2, 3], think_time=0.0, api_time=2.0),
    *DELTA["requests"][1:3],
    request(10.0, 21, hash_ids=[1, 2, 3, 4, 5], think_time=8.0, api_time=1.0, ttft=0.5),
    request(15.0, 9, hash_ids=[1, 9]),
)


def write(path: Path, *records: dict[str, Any]) -> Path:
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_weka_delta_records_become_runs_with_exact_blocks(tmp_path: Path) -> None:
    root, *_ = read_weka(write(tmp_path / "w.jsonl.gz", DELTA))
    assert list(expand(root)) == [[1, 2, 3], [1, 2, 3, 4, 5], [1, 9]]
    assert root.turns[1].prompt == BlocksPrompt(keep=3, add=((4, 2),), tail_tokens=1)
    assert [root.prompt_tokens(i) for i in range(3)] == [13, 21, 9]
    assert [turn.ttft_ms for turn in root.turns] == [None, 500.0, None]
    assert root.turns[0].latency_ms == 2000.0


def test_weka_files_with_whole_hash_ids_give_the_same_runs(tmp_path: Path) -> None:
    delta = list(read_weka(write(tmp_path / "delta.jsonl", DELTA)))
    assert list(read_weka(write(tmp_path / "full.json", FULL))) == delta


def test_a_weka_file_spread_over_lines_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "pretty.json"
    path.write_text(json.dumps(FULL, indent=1))
    assert list(read_weka(path)) == list(read_weka(write(tmp_path / "delta.jsonl", DELTA)))


def test_a_folder_of_weka_files_is_read_in_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b.json", session(request(0.0, 4, hash_ids=[1]), name="second"))
    write(tmp_path / "a.json.gz", session(request(0.0, 4, hash_ids=[1]), name="first"))
    assert [run.id for run in read_weka(tmp_path)] == ["first", "second"]


def test_sub_agents_fork_where_they_started_and_join_where_the_parent_waits(tmp_path: Path) -> None:
    ((root, waited, launched),) = read_sessions(read_weka(write(tmp_path / "w.jsonl", DELTA)))
    assert (waited.id, waited.kind, waited.fork) == ("s/agent_001", "Explore", Fork(parent="s", after=1, joins=1))
    assert launched.fork == Fork(parent="s", after=1)
    assert [turn.at_ms for turn in waited.turns] == [3000.0, 7000.0]
    assert launched.turns[0].at_ms == 3500.0
    assert [turn.gap_ms for turn in waited.turns] == [None, 3000.0]
    # the parent's next turn came at 10 s; its sub-agent ended at 9 s, so 1 s of the 8 s was the parent's own
    assert [turn.gap_ms for turn in root.turns] == [None, 1000.0, 4000.0]


def test_weka_times_that_were_not_recorded_stay_unknown(tmp_path: Path) -> None:
    (run,) = read_weka(
        write(tmp_path / "w.json", session(request(0.0, 4, hash_ids=[1]), request(5.0, 8, hash_ids=[1, 2])))
    )
    assert [(turn.at_ms, turn.gap_ms, turn.latency_ms) for turn in run.turns] == [
        (0.0, None, None),
        (5000.0, None, None),
    ]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"id": "s"}, "not a Weka session"),
        (session(request(0.0, 4, keep=2, add=[])), "keeps 2 of 0 blocks"),
        (session(request(0.0, 7, keep=0, add=[[1, 2]])), "2 blocks of 4 but 7 in"),
    ],
)
def test_a_bad_weka_session_is_named_by_its_line(tmp_path: Path, record: dict[str, Any], problem: str) -> None:
    path = write(tmp_path / "w.jsonl", session(request(0.0, 4, hash_ids=[1])), record)
    with pytest.raises(TraceError, match=problem) as caught:
        list(read_weka(path))
    assert caught.value.line == 2


def line(at_us: int, said: str, answer: str, name: str = "x") -> dict[str, Any]:
    return {"timestamp": at_us, "input": said, "output": answer, "session_id": name}


def test_a_plain_lmcache_session_gets_its_answers_back_between_the_observations(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl.gz",
        line(1_000_000, "fix it", "ls"),
        line(3_500_000, "fix it\n\n<output>b</output>\n\n<output>c</output>", "done"),
        line(2_000_000, "fix it\n\n<output>b</output>", "cat b"),
    )
    (run,) = read_lmcache(path)
    assert list(expand(run))[-1] == [
        Message("user", "fix it"),
        Message("assistant", "ls"),
        Message("user", "<output>b</output>"),
        Message("assistant", "cat b"),
        Message("user", "<output>c</output>"),
    ]
    assert [turn.prompt.keep for turn in run.turns] == [0, 1, 3]
    assert [turn.at_ms for turn in run.turns] == [0.0, 1000.0, 2500.0]
    assert [turn.output for turn in run.turns] == ["ls", "cat b", "done"]


def test_an_lmcache_transcript_becomes_messages_and_may_be_rewritten(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl",
        line(1, "system: be brief\n\nuser: a: b\n\nc", "1"),
        line(2, "", "an image was here"),
        line(3, "system: be brief\n\nassistant: 1\n\nuser: go", "2"),
    )
    (run,) = read_lmcache(path)
    assert list(expand(run)) == [
        [Message("system", "be brief"), Message("user", "a: b\n\nc")],
        [Message("system", "be brief"), Message("assistant", "1"), Message("user", "go")],
    ]
    assert run.turns[1].prompt.keep == 1


def test_lmcache_sessions_of_one_file_are_apart_and_may_not_come_back(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", line(1, "a", "1", "x"), line(2, "b", "2", "y"), line(3, "a", "3", "x"))
    runs = read_lmcache(path)
    assert [next(runs).id, next(runs).id] == ["x", "y"]
    with pytest.raises(TraceError, match="sort the file by session_id") as caught:
        next(runs)
    assert caught.value.line == 3


def test_a_bad_lmcache_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(line(1, "a", "b")) + '\n{"timestamp": "x"}\n')
    with pytest.raises(TraceError, match="not an LMCache request") as caught:
        list(read_lmcache(path))
    assert caught.value.line == 2
