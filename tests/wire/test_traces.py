"""The run trace format: what is written comes back, what is wrong is named with its line."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.wire.records import MissRow, TurnRow
from trunkline.wire.reshape import scale
from trunkline.wire.traces import (
    BlocksPrompt,
    Fork,
    Message,
    MessagesPrompt,
    Prompt,
    RunTrace,
    TokensPrompt,
    Tool,
    ToolCall,
    TraceError,
    TurnKind,
    TurnTrace,
    count_ids,
    expand,
    expand_session,
    id_runs,
    read_runs,
    read_sessions,
    size,
    spread,
    write_runs,
)

ROW = TurnRow(
    index=0,
    at=1.5,
    node="local",
    prompt_tokens=10,
    cached_tokens=4,
    novel_tokens=6,
    reusable_tokens=4,
    completion_tokens=3,
    misses=(MissRow(reason="never_seen", tokens=6),),
    queue_ms=0.0,
    prefill_ms=5.0,
    decode_ms=2.0,
    latency_ms=7.0,
    tool_gap_ms=None,
    finish_reason="stop",
)


def chat(*turns: TurnTrace, name: str = "a") -> RunTrace:
    return RunTrace(id=name, turns=turns)


def blocks(name: str, *adds: tuple[int, tuple[tuple[int, int], ...]], fork: Fork | None = None) -> RunTrace:
    turns = tuple(TurnTrace(prompt=BlocksPrompt(keep=keep, add=add), output_tokens=8) for keep, add in adds)
    return RunTrace(id=name, block_tokens=64, fork=fork, turns=turns)


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.gz"])
def test_runs_come_back_as_they_were_written(tmp_path: Path, name: str) -> None:
    first = TurnTrace(prompt=MessagesPrompt(add=(Message("user", "hé\n"),)), output="yes", finish="stop", result=ROW)
    second = TurnTrace(prompt=MessagesPrompt(keep=1, add=(Message("assistant", "yes"),)), gap_ms=2.5, latency_ms=9.0)
    fork = Fork(parent="b", after=1, joins=2)
    runs = [chat(first, second), blocks("b", (0, ((1, 3),)), (2, ())), blocks("b/1", (1, ((9, 1),)), fork=fork)]
    path = tmp_path / name
    assert write_runs(path, runs) == 3
    assert list(read_runs(path)) == runs
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


WORDS = st.text(max_size=6)
LENGTHS = st.none() | st.integers(0, 2**40)
TIMES = st.none() | st.floats(0, 1e12)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=WORDS,
    tool_calls=st.lists(st.builds(ToolCall, WORDS, WORDS, WORDS), max_size=2).map(tuple),
    tool_call_id=WORDS,
    name=WORDS,
)
SPANS = st.lists(st.tuples(st.integers(0, 2**30), st.integers(1, 2**20)), max_size=3).map(tuple)
PROMPTS: list[st.SearchStrategy[Prompt]] = [
    st.builds(MessagesPrompt, add=st.lists(MESSAGES, max_size=3).map(tuple)),
    st.builds(TokensPrompt, add=st.lists(st.integers(0, 2**17), max_size=5).map(tuple)),
    st.builds(BlocksPrompt, add=SPANS, tail_tokens=st.integers(0, 63), tail_id=st.none() | st.integers(0, 2**31)),
]


@st.composite
def any_run(draw: st.DrawFn) -> RunTrace:
    prompts = draw(st.sampled_from(PROMPTS))
    turns: list[TurnTrace] = []
    held = 0
    for _ in range(draw(st.integers(0, 4))):
        prompt = msgspec.structs.replace(draw(prompts), keep=draw(st.integers(0, held)))
        held = size(prompt)
        turns.append(
            TurnTrace(
                prompt=prompt,
                kind=draw(st.sampled_from(TurnKind)),
                output=draw(st.none() | WORDS),
                calls=draw(st.lists(st.builds(ToolCall, WORDS, WORDS, WORDS), max_size=1).map(tuple)),
                output_tokens=draw(LENGTHS),
                finish=draw(WORDS),
                model=draw(WORDS),
                at_ms=draw(TIMES),
                gap_ms=draw(TIMES),
                ttft_ms=draw(TIMES),
                latency_ms=draw(TIMES),
                result=draw(st.sampled_from([None, ROW])),
            )
        )
    tools = st.lists(
        st.builds(Tool, WORDS, WORDS, st.dictionaries(WORDS, st.integers() | WORDS, max_size=2)), max_size=2
    )
    return RunTrace(
        id=draw(WORDS),
        turns=tuple(turns),
        kind=draw(WORDS),
        source=draw(WORDS),
        begin_ms=draw(TIMES),
        block_tokens=draw(st.integers(1, 512)),
        space=draw(WORDS),
        tools=draw(tools.map(tuple)),
        task=draw(WORDS),
        reward=draw(st.none() | st.floats(-1, 1)),
        note=draw(WORDS),
    )


@given(st.lists(any_run(), max_size=4))
def test_any_runs_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, runs: list[RunTrace]
) -> None:
    path = tmp_path_factory.mktemp("any") / "runs.jsonl"
    assert write_runs(path, runs) == len(runs)
    assert list(read_runs(path)) == runs


def test_a_file_that_cannot_be_written_whole_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("as before")

    def runs() -> Iterator[RunTrace]:
        yield blocks("a")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_runs(path, runs())
    assert [file.name for file in tmp_path.iterdir()] == ["runs.jsonl"]
    assert path.read_text() == "as before"


def test_ids_become_runs_and_runs_become_ids() -> None:
    ids = [4, 5, 6, 2, 9, 10, 2]
    assert id_runs(ids) == [(4, 3), (2, 1), (9, 2), (2, 1)]
    assert list(spread(id_runs(ids))) == ids
    assert count_ids(id_runs(ids)) == 7
    assert id_runs([]) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 99), max_size=5)), min_size=1, max_size=6))
def test_expanding_keeps_what_keep_says_and_adds_the_rest(deltas: list[tuple[int, list[int]]]) -> None:
    want: list[list[int]] = []
    turns = []
    for keep, add in deltas:
        before = want[-1] if want else []
        kept = min(keep, len(before))
        turns.append(TurnTrace(prompt=TokensPrompt(keep=kept, add=tuple(add))))
        want.append(before[:kept] + add)
    assert list(expand(chat(*turns))) == want


def test_a_forked_run_starts_from_its_parents_last_prompt_before_the_fork() -> None:
    parent = blocks("p", (0, ((1, 4),)), (4, ((5, 2),)), (6, ((7, 1),)))
    child = blocks("p/c", (5, ((50, 1),)), fork=Fork(parent="p", after=2, joins=2))
    grandchild = blocks("p/c/g", (2, ((70, 1),)), fork=Fork(parent="p/c", after=0))
    prompts = expand_session((parent, child, grandchild))
    assert prompts["p/c"] == [[1, 2, 3, 4, 5, 50]]
    assert prompts["p/c/g"] == [[1, 2, 70]]


def test_scaling_divides_sizes_and_keeps_block_ids() -> None:
    turn = TurnTrace(prompt=BlocksPrompt(add=((1, 3), (9, 1)), tail_tokens=33), output_tokens=200)
    run = RunTrace(id="r", block_tokens=64, turns=(turn, TurnTrace(prompt=BlocksPrompt(keep=4), output_tokens=3)))
    small = scale(run, 16, 8)
    assert small.block_tokens == 4
    assert small.turns[0].prompt == BlocksPrompt(add=((1, 3), (9, 1)), tail_tokens=2)
    assert [turn.output_tokens for turn in small.turns] == [25, 1]
    assert list(expand(small)) == list(expand(run))


@pytest.mark.parametrize(
    ("run", "divisor"), [(blocks("b", (0, ((1, 1),))), 3), (chat(TurnTrace(prompt=MessagesPrompt())), 2)]
)
def test_scaling_refuses_what_cannot_be_divided(run: RunTrace, divisor: int) -> None:
    with pytest.raises(ValueError, match="only block traces scale"):
        scale(run, divisor)


def test_sessions_are_a_root_and_what_follows_from_it() -> None:
    runs = [blocks("a"), blocks("b"), blocks("b/1", fork=Fork(parent="b", after=0)), blocks("c")]
    assert [[run.id for run in session] for session in read_sessions(runs)] == [["a"], ["b", "b/1"], ["c"]]


@pytest.mark.parametrize(
    ("fork", "problem"),
    [
        (Fork(parent="elsewhere", after=0), "did not bring before"),
        (Fork(parent="a", after=3), "forks after 3"),
        (Fork(parent="a", after=2, joins=1), "joins at 1"),
        (Fork(parent="a", after=0), "keeps 1 of the 0 symbols"),
    ],
)
def test_a_fork_that_cannot_be_is_refused(fork: Fork, problem: str) -> None:
    runs = [blocks("a", (0, ((1, 2),)), (2, ())), blocks("a/1", (1, ((9, 1),)), fork=fork)]
    with pytest.raises(ValueError, match=problem):
        list(read_sessions(runs))


GOOD = b'{"format":"trunkline.run.1","id":"a","turns":[]}\n'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not a run trace"),
        (b'{"format":"trunkline.run.2","id":"a","turns":[]}', "not a run trace"),
        (b'{"format":"trunkline.run.1","id":"a","turns":[],"trns":1}', "trns"),
        (b'{"format":"trunkline.run.1","id":"a","turns":[{"prompt":{"type":"tokens","keep":1}}]}', "keeps 1 of the 0"),
        (b'{"format":"trunkline.run.1","id":"a","turns":[{"prompt":{"type":"blocks"}}]}', "`block_tokens` must say"),
        (
            b'{"format":"trunkline.run.1","id":"a","turns":[{"prompt":{"type":"tokens"}},{"prompt":{"type":"messages"}}]}',
            "changes the kind",
        ),
        (
            b'{"format":"trunkline.run.1","id":"a","block_tokens":4,"turns":[{"prompt":{"type":"blocks","add":[[1,0]]}}]}',
            "empty run",
        ),
        (
            b'{"format":"trunkline.run.1","id":"a","block_tokens":4,"turns":[{"prompt":{"type":"blocks","add":[[2147483647,1]]}}]}',
            "outside 0 to",
        ),
        (
            b'{"format":"trunkline.run.1","id":"a","block_tokens":4,"turns":[{"prompt":{"type":"blocks","tail_tokens":-1}}]}',
            "tail of -1",
        ),
        (
            b'{"format":"trunkline.run.1","id":"a","turns":[{"prompt":{"type":"tokens"},"output_tokens":3,"output_ids":[[1,2]]}]}',
            "not its 3 output tokens",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n")
    runs = read_runs(path)
    assert next(runs).id == "a"
    with pytest.raises(TraceError, match=problem) as caught:
        next(runs)
    assert caught.value.line == 3
    assert str(path) in str(caught.value)


def test_a_run_may_not_be_twice_in_its_session() -> None:
    fork = Fork(parent="a", after=0)
    with pytest.raises(ValueError, match="twice in its session"):
        list(read_sessions([blocks("a"), blocks("b", fork=fork), blocks("b", fork=fork)]))


def test_a_fork_may_not_keep_symbols_of_another_kind() -> None:
    child = RunTrace(id="c", turns=(TurnTrace(prompt=TokensPrompt(keep=1)),), fork=Fork(parent="a", after=1))
    with pytest.raises(ValueError, match="keeps 1 of the 2 symbols"):
        list(read_sessions([blocks("a", (0, ((1, 2),))), child]))


def test_a_corrupt_gzip_file_is_a_trace_error(tmp_path: Path) -> None:
    path = tmp_path / "corrupt.jsonl.gz"
    packed = bytearray(gzip.compress(GOOD * 1000))
    packed[20:40] = bytes(20)
    path.write_bytes(packed)
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_runs(path))


def test_a_torn_gzip_file_is_a_trace_error_after_the_lines_that_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD * 1000)[:-12])
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_runs(path))


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_runs(tmp_path / "none.jsonl"))


def test_the_example_in_the_documentation_is_a_trace(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()
    path = tmp_path / "example.jsonl"
    path.write_text(page.split("```json\n")[1].split("```")[0])
    sessions = list(read_sessions(read_runs(path)))
    assert [[run.id for run in session] for session in sessions] == [
        *(["fix-1234", "fix-1234/explore"], ["blocks-only"], ["tokens"])
    ]
    assert len(expand_session(sessions[0])["fix-1234/explore"][0]) == 2
