"""Every trace format is read, and told from its content: small files of the shapes that the public corpora have."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trunkline.wire.formats import FORMATS, guess, read_trace, read_trace_sessions
from trunkline.wire.records import RunView, TurnRow
from trunkline.wire.traces import (
    BlocksPrompt,
    Fork,
    Message,
    MessagesPrompt,
    RunTrace,
    Tool,
    ToolCall,
    TraceError,
    TurnKind,
    expand,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}


def put(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def read(path: Path, name: str = "auto") -> list[RunTrace]:
    return [run for session in read_trace_sessions(path, name) for run in session]


# --- arrivals -------------------------------------------------------------------------------------------------------


def mooncake(at: int, tokens: int, *ids: int) -> dict[str, Any]:
    return {"timestamp": at, "input_length": tokens, "output_length": 7, "hash_ids": ids}


def test_a_mooncake_request_is_a_run_of_one_turn_in_an_id_space_of_its_file(tmp_path: Path) -> None:
    path = put(tmp_path / "m.jsonl.gz", lines(mooncake(0, 1100, 0, 1, 2), mooncake(30, 1024, 0, 5)))
    one, two = read(path)
    assert one.turns[0].prompt == BlocksPrompt(add=((0, 2),), tail_tokens=76, tail_id=2)
    assert two.turns[0].prompt == BlocksPrompt(add=((0, 1), (5, 1)))
    assert [run.prompt_tokens(0) for run in (one, two)] == [1100, 1024]
    assert (one.space, one.block_tokens, one.turns[0].output_tokens) == ("m", 512, 7)
    assert [run.begin_ms for run in (one, two)] == [0, 30]


@pytest.mark.parametrize(
    ("request_", "problem"),
    [(mooncake(0, 1100, 0, 1), "2 ids for 1100 tokens"), (mooncake(0, 5, -1), "not a Mooncake request"), ({}, "not a")],
)
def test_a_bad_mooncake_request_is_named_by_its_line(tmp_path: Path, request_: dict[str, Any], problem: str) -> None:
    path = put(tmp_path / "m.jsonl", lines(mooncake(0, 5, 1), request_))
    with pytest.raises(TraceError, match=problem) as caught:
        read(path)
    assert caught.value.line == 2


def test_azure_arrivals_have_lengths_and_nothing_in_common(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:05.0000000,100,8\r\n"
    )
    one, two = read(put(tmp_path / "a.csv", text))
    assert [run.prompt_tokens(0) for run in (one, two)] == [4808, 100]
    assert one.begin_ms == 0
    assert two.begin_ms == pytest.approx(1020.04, abs=0.01)


def test_a_bad_azure_line_is_named(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,10\n")
    with pytest.raises(TraceError, match="not an Azure request") as caught:
        read(path)
    assert caught.value.line == 2


# --- chats ----------------------------------------------------------------------------------------------------------

TRAJECTORY = {
    "history": [
        {"role": "system", "content": "act", "agent": "main", "message_type": "system_prompt"},
        {"role": "assistant", "content": "a demonstration", "is_demo": True},
        {"role": "user", "content": [{"type": "text", "text": "fix it"}], "agent": "main"},
        {"role": "assistant", "content": "I look.", "thought": "I look.", "action": "look x", "tool_calls": [CALL]},
        {"role": "tool", "content": "nothing", "tool_call_ids": ["c1"]},
        {"role": "assistant", "content": "done", "action": "submit"},
    ],
    "trajectory": [{"action": "look x", "execution_time": 0.25}, {"action": "submit", "execution_time": 0.5}],
    "info": {"exit_status": "submitted"},
}


def test_a_swe_agent_trajectory_has_a_turn_for_each_answer_but_demonstrations(tmp_path: Path) -> None:
    (run,) = read(put(tmp_path / "some.traj.gz", json.dumps(TRAJECTORY, indent=1)))
    assert run.id == "some"
    look = ToolCall("c1", "look", '{"at": "x"}')
    assert list(expand(run))[1] == [
        Message("system", "act"),
        Message("assistant", "a demonstration"),
        Message("user", "fix it"),
        Message("assistant", "I look.", (look,)),
        Message("tool", "nothing", tool_call_id="c1"),
    ]
    assert [turn.output for turn in run.turns] == ["I look.", "done"]
    assert run.turns[0].calls == (look,)
    assert [turn.kind for turn in run.turns] == [TurnKind.USER, TurnKind.TOOL]
    assert [turn.gap_ms for turn in run.turns] == [None, 250.0]


def test_tool_times_are_unknown_where_the_trajectory_has_none(tmp_path: Path) -> None:
    bare = {"history": TRAJECTORY["history"]}
    (run,) = read(put(tmp_path / "some.traj", json.dumps(bare)))
    assert [turn.gap_ms for turn in run.turns] == [None, None]


def tau(trial: int, reward: float) -> dict[str, Any]:
    return {
        "task_id": 7,
        "trial": trial,
        "reward": reward,
        "info": {},
        "traj": [
            {"role": "system", "content": "policy"},
            {"role": "user", "content": "cancel"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "found"},
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "###STOP###"},
        ],
    }


TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("form", [lines, lambda *values: json.dumps(values), lambda *v: json.dumps(v, indent=2)])
def test_tau_bench_runs_have_a_task_a_reward_and_their_domains_tools(tmp_path: Path, form: Callable[..., str]) -> None:
    put(tmp_path / "tools_airline.json", json.dumps(TOOLS))
    put(tmp_path / "tools_retail.json", json.dumps([]))
    put(tmp_path / "gpt-airline.json", form(tau(0, 0.0), tau(1, 1.0)))
    one, two = read(tmp_path, "tau_bench")
    assert [run.id for run in (one, two)] == ["gpt-airline/task-7/trial-0", "gpt-airline/task-7/trial-1"]
    assert [(run.task, run.reward) for run in (one, two)] == [("airline/7", 0.0), ("airline/7", 1.0)]
    assert one.tools == (Tool("look", "d", {"type": "object"}),)
    assert [turn.kind for turn in one.turns] == [TurnKind.USER, TurnKind.TOOL]
    assert one.turns[0].calls == (ToolCall("c1", "look", '{"at": "x"}'),)
    assert one.turns[1].prompt == MessagesPrompt(
        keep=2,
        add=(
            Message("assistant", "", (ToolCall("c1", "look", '{"at": "x"}'),)),
            Message("tool", "found", tool_call_id="c1", name="look"),
        ),
    )


def test_a_few_shot_chat_is_read_without_the_calls_that_it_lacks(tmp_path: Path) -> None:
    said = "user: hi: there\nsecond line\nassistant: None\ntool: found\nassistant: Done."
    (run,) = read(put(tmp_path / "few_shot.jsonl", lines({"messages_display": said})))
    assert list(expand(run))[-1] == [
        Message("user", "hi: there\nsecond line"),
        Message("assistant", ""),
        Message("tool", "found"),
    ]
    assert [turn.output for turn in run.turns] == [None, "Done."]


# --- spans ----------------------------------------------------------------------------------------------------------


def span(name: str, begin: float, end: float, *said: str, parent: str | None = None, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return {
        "trace_id": "t",
        "span_id": name,
        "parent_span_id": parent,
        "name": "chat m",
        "start_time": f"2026-01-01T00:00:{begin:09.6f}",
        "end_time": f"2026-01-01T00:00:{end:09.6f}",
        "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "session.id": "s",
            "gen_ai.input.messages": json.dumps(messages),
            "gen_ai.output.text": f"answer {name}",
            **more,
        },
    }


def spans(*values: dict[str, Any]) -> str:
    return json.dumps({"trace_id": "t", "spans": values}, indent=1)


def test_spans_that_overlap_fan_out_and_the_next_alone_fans_in(tmp_path: Path) -> None:
    tool = {**span("tool", 1, 9), "attributes": {"gen_ai.operation.name": "execute_tool"}}
    path = put(
        tmp_path / "o.json",
        spans(
            span("plan", 0, 2, "q"),
            span("a1", 3, 4, "q", "answer plan", "part a"),
            span("b1", 3.5, 6, "other"),
            span("a2", 5, 7, "q", "answer plan", "part a", "answer a1", "go on"),
            span("merge", 8, 9, "q", "answer plan", "all parts"),
            tool,
        ),
    )
    root, a, b = read(path)
    assert [turn.output for turn in root.turns] == ["answer plan", "answer merge"]
    assert [turn.output for turn in a.turns] == ["answer a1", "answer a2"]
    assert a.fork == b.fork == Fork(parent=root.id, after=1, joins=1)
    assert [turn.prompt.keep for turn in a.turns] == [1, 3]
    assert [turn.gap_ms for turn in root.turns] == [None, 1000.0]
    assert [turn.gap_ms for turn in a.turns] == [1000.0, 1000.0]
    assert [turn.gap_ms for turn in b.turns] == [1500.0]
    assert b.turns[0].latency_ms == 2500.0
    assert root.id == "o/s"


def test_spans_with_the_same_parent_are_one_agents(tmp_path: Path) -> None:
    path = put(
        tmp_path / "o.json",
        spans(
            span("x1", 0, 1, "x", parent="x"),
            span("y1", 0.5, 5, "y", parent="y"),
            span("x2", 2, 3, "rewritten", parent="x"),
        ),
    )
    root, other = read(path)
    assert [len(run.turns) for run in (root, other)] == [2, 1]
    assert other.fork == Fork(parent=root.id, after=0)
    assert root.turns[0].gap_ms is None


def test_spans_in_the_conventions_parts_keep_tool_calls_and_their_results(tmp_path: Path) -> None:
    said = [
        {"role": "user", "parts": [{"type": "text", "content": "fix"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": "x"}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "found"}]},
    ]
    out = [{"role": "assistant", "parts": [{"type": "text", "content": "ok"}], "finish_reason": "stop"}]
    more: dict[str, Any] = {
        "gen_ai.input.messages": said,
        "gen_ai.output.messages": out,
        "gen_ai.usage.output_tokens": 3,
    }
    (run,) = read(put(tmp_path / "o.json", spans(span("a", 0, 1, **more))))
    assert next(expand(run)) == [
        Message("user", "fix"),
        Message("assistant", "", (ToolCall("c1", "look", '{"at":"x"}'),)),
        Message("tool", "found", tool_call_id="c1"),
    ]
    assert (run.turns[0].output, run.turns[0].output_tokens, run.turns[0].kind) == ("ok", 3, TurnKind.TOOL)


def test_a_bad_span_is_named(tmp_path: Path) -> None:
    path = put(tmp_path / "o.json", spans(span("good", 0, 1, "q"), span("bad", 2, 1, "q")))
    with pytest.raises(TraceError, match=r"span 1 \('bad'\) cannot be read: it ends before it starts"):
        read(path)


# --- telling formats apart ------------------------------------------------------------------------------------------

WEKA = {
    "id": "s",
    "block_size": 64,
    "requests": [{"t": 0, "type": "n", "in": 70, "out": 1, "keep": 0, "add": [[1, 1]]}],
}
LMCACHE = {"timestamp": 1, "input": "a", "output": "b", "session_id": "x"}
RECORD = RunView(
    id="r",
    parent=None,
    children=(),
    state="waiting",
    origin="header",
    node="local",
    started_at=0.0,
    last_at=0.0,
    turns=(
        TurnRow(
            index=0,
            at=0.0,
            node="local",
            prompt_tokens=5,
            cached_tokens=0,
            novel_tokens=5,
            reusable_tokens=0,
            completion_tokens=1,
            misses=(),
            queue_ms=0.0,
            prefill_ms=0.0,
            decode_ms=0.0,
            latency_ms=0.0,
            tool_gap_ms=None,
            finish_reason="stop",
        ),
    ),
)
SAMPLES = {
    "trunkline": '{"format":"trunkline.run.1","id":"a","turns":[]}\n',
    "weka": json.dumps(WEKA, indent=1),
    "mooncake": lines(mooncake(0, 5, 1)),
    "lmcache": lines(LMCACHE),
    "swe_agent": json.dumps(TRAJECTORY),
    "otel": spans(span("a", 0, 1, "q")),
    "tau_bench": lines(tau(0, 1.0)),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,1\n",
    "records": msgspec.json.format(msgspec.json.encode(RECORD), indent=2).decode() + "\n",
}


def test_there_is_a_sample_of_every_format() -> None:
    assert SAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_format_is_told_from_the_content_and_read(tmp_path: Path, name: str, packed: bool) -> None:
    path = put(tmp_path / ("sample.gz" if packed else "sample"), SAMPLES[name])
    assert guess(path) == name
    assert [run.id for run in read(path)] == [run.id for run in read(path, name)]
    assert len(read(path)) == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", "hello, world", '{"a": 1'])
def test_what_is_no_trace_is_said_to_be_none_with_the_formats_there_are(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="say which with --format: trunkline, weka") as caught:
        guess(put(tmp_path / "x", text))
    assert caught.value.line is None


def test_a_servers_database_is_told_how_to_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="trunkline trace export"):
        guess(put(tmp_path / "runs.sqlite", "SQLite format 3\0 and so on"))


@pytest.mark.parametrize("name", ["auto", *FORMATS])
def test_a_missing_file_and_an_empty_folder_are_errors_in_every_format(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="no such file"):
        list(read_trace(tmp_path / "none", name))
    with pytest.raises(TraceError, match=r"holds no run|cannot be told"):
        list(read_trace(tmp_path / "empty", name))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ['{"a": 1}\n', "\x00\x01\x02", "\ufeff[", '{"id": 1, "turns": 2}'])
def test_a_file_of_another_format_is_a_trace_error_that_names_it(tmp_path: Path, name: str, text: str) -> None:
    path = put(tmp_path / "wrong.json", text)
    with pytest.raises(TraceError, match=r"wrong\.json"):
        read(path, name)


@pytest.mark.parametrize("name", FORMATS)
def test_a_torn_gzip_file_is_a_trace_error_in_every_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / "torn.json.gz"
    path.write_bytes(gzip.compress(SAMPLES[name].encode() * 50)[:-9])
    with pytest.raises(TraceError, match="torn"):
        read(path, name)


def test_runs_that_do_not_fit_together_are_a_trace_error(tmp_path: Path) -> None:
    child = '{"format":"trunkline.run.1","id":"c","turns":[],"fork":{"parent":"b","after":0}}\n'
    with pytest.raises(TraceError, match="names parent 'b'"):
        read(put(tmp_path / "t.jsonl", SAMPLES["trunkline"] + child))
