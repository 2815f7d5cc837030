"""The closed-loop replay driver against a server that logs what it is asked."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import uvicorn

from tests.bench.fake_server import FakeServer
from trunkline.bench.client import Endpoint, EndpointError
from trunkline.bench.command import main
from trunkline.bench.events import Event, RunEvent, TurnEvent, read_events
from trunkline.bench.filler import Filler
from trunkline.bench.fit import fit
from trunkline.bench.replay import Form, History, Replay, ReplaySettings
from trunkline.bench.report import show, summarize
from trunkline.bench.reuse import count_reusable
from trunkline.wire.traces import (
    BlocksPrompt,
    Fork,
    Message,
    MessagesPrompt,
    RunTrace,
    Session,
    TokensPrompt,
    Tool,
    ToolCall,
    TurnTrace,
    write_runs,
)


def block_turn(keep: int, *add: tuple[int, int], tail: int = 0) -> TurnTrace:
    return TurnTrace(prompt=BlocksPrompt(keep=keep, add=add, tail_tokens=tail), output_tokens=2)


def block_run(name: str, *turns: TurnTrace, fork: Fork | None = None) -> RunTrace:
    return RunTrace(id=name, block_tokens=4, turns=turns, fork=fork)


def chat_run(name: str, *exchanges: tuple[str, str]) -> RunTrace:
    """A run whose user says the first of each pair and whose recorded model answers the second."""
    turns, answer = [], None
    for said, answered in exchanges:
        user = Message("user", said)
        if answer is None:
            prompt = MessagesPrompt(add=(user,))
        else:
            prompt = MessagesPrompt(keep=2 * len(turns) - 1, add=(Message("assistant", answer), user))
        turns.append(TurnTrace(prompt=prompt, output=answered, output_tokens=3))
        answer = answered
    return RunTrace(id=name, turns=tuple(turns))


CHAT = chat_run("c", ("read the file", "recorded one"), ("and the next", "recorded two"), ("stop", "recorded three"))
FORKED: Session = (
    block_run("p", block_turn(0, (1, 5)), block_turn(5, (6, 2)), block_turn(7, (8, 1))),
    block_run("p/1", block_turn(5, (20, 1)), block_turn(6, (21, 1)), fork=Fork(parent="p", after=1, joins=2)),
    block_run("p/2", block_turn(0, (30, 1)), fork=Fork(parent="p", after=3)),
)


def replay(server: FakeServer, sessions: Sequence[Session], **settings: Any) -> list[Event]:
    """Play `sessions` and count what was reusable; turn events in order of arrival, then run events."""

    async def play() -> list[Event]:
        async with Endpoint("http://fake", transport=httpx.ASGITransport(app=server.app)) as endpoint:
            played = Replay(endpoint, ReplaySettings(model="fake", **settings))
            await played.play(sessions)
            await count_reusable(endpoint, played.sent, played.settings.history is History.LIVE)
            return [*(sent.event for sent in played.sent), *played.runs]

    return asyncio.run(play())


def turns(events: Sequence[Event]) -> list[TurnEvent]:
    return [event for event in events if isinstance(event, TurnEvent)]


def test_block_prompts_share_exactly_the_tokens_that_their_blocks_share() -> None:
    server = FakeServer()
    run = block_run("r", block_turn(0, (1, 3), tail=2), block_turn(3, (4, 1), tail=1), block_turn(1, (9, 2)))
    events = turns(replay(server, [(run,)]))
    assert [len(asked["tokens"]) for asked in server.log] == [14, 17, 12]
    assert {asked["path"] for asked in server.log} == {"/v1/completions"}
    assert [event.cached_tokens for event in events] == [0, 12, 4]
    assert [event.reusable_tokens for event in events] == [0, 12, 4]


def test_block_prompts_as_text_share_as_much_of_one_message() -> None:
    server = FakeServer()
    run = block_run("r", block_turn(0, (1, 3)), block_turn(3, (4, 1)))
    events = turns(replay(server, [(run,)], form=Form.TEXT))
    assert [len(asked["messages"]) for asked in server.log] == [1, 1]
    assert [event.prompt_tokens for event in events] == [12 + 3, 16 + 3]
    assert [event.cached_tokens for event in events] == [0, 12 + 1]


def test_equal_block_ids_of_two_sessions_are_different_tokens() -> None:
    server = FakeServer()
    events = turns(replay(server, [(block_run(name, block_turn(0, (1, 3))),) for name in "ab"]))
    assert [event.reusable_tokens for event in events] == [0, 0]


def test_token_prompts_are_sent_as_they_are() -> None:
    server = FakeServer()
    run = RunTrace(
        id="t", turns=(TurnTrace(prompt=TokensPrompt(add=(5, 6, 7))), TurnTrace(prompt=TokensPrompt(keep=2)))
    )
    replay(server, [(run,)], output_tokens=7)
    assert [asked["prompt"] for asked in server.log] == [[5, 6, 7], [5, 6]]
    assert [asked["max_tokens"] for asked in server.log] == [7, 7]


def test_outputs_have_their_recorded_length_whatever_the_model_wants() -> None:
    server = FakeServer()
    events = turns(replay(server, [(CHAT,)], extra_body={"seed": 3}))
    assert {(a["max_tokens"], a["ignore_eos"], a["temperature"], a["seed"]) for a in server.log} == {(3, True, 0, 3)}
    assert [event.completion_tokens for event in events] == [3, 3, 3]


def test_recorded_history_replays_the_recorded_answers() -> None:
    server = FakeServer()
    replay(server, [(CHAT,)])
    assert [m["content"] for m in server.log[-1]["messages"]] == [
        *("read the file", "recorded one", "and the next", "recorded two", "stop")
    ]


def test_live_history_puts_the_models_own_answers_where_the_recorded_ones_were() -> None:
    server = FakeServer()
    events = turns(replay(server, [(CHAT,)], history=History.LIVE))
    assert [m["content"] for m in server.log[-1]["messages"]] == [
        *("read the file", "live0.0 live0.1 live0.2 ", "and the next", "live1.0 live1.1 live1.2 ", "stop")
    ]
    # the answer arrived too: prompt (6 tokens), answer (3) and nothing of what follows
    assert [event.prompt_tokens for event in events] == [6, 16, 24]
    assert [event.reusable_tokens for event in events] == [0, 9, 19]


def test_a_sub_agent_forks_with_its_parents_prompt_and_the_parent_waits_for_it() -> None:
    server = FakeServer()
    events = replay(server, [FORKED], session_header="X-Session-ID")
    order = [asked["headers"]["x-session-id"] for asked in server.log]
    assert order[0] == "p"
    assert order.index("p/1") < len(order) - 2
    assert [run for run in order if run != "p/2"][-1] == "p", "the parent's last turn waits for p/1"
    assert order[-1] == "p/2", "forked after the parent's last turn, waited for by nobody"
    first = next(event for event in turns(events) if event.run == "p/1")
    assert (first.prompt_tokens, first.reusable_tokens) == (24, 20)
    ended = {event.run: event for event in events if isinstance(event, RunEvent)}
    assert {name: run.turns for name, run in ended.items()} == {"p": 3, "p/1": 2, "p/2": 1}
    assert ended["p"].ended_ms >= ended["p/1"].ended_ms


def test_no_header_of_ours_is_sent_unless_asked() -> None:
    server = FakeServer()
    replay(server, [(CHAT,)])
    assert set(server.log[0]["headers"]) <= {
        *("host", "accept", "accept-encoding", "connection", "user-agent", "content-length", "content-type")
    }


@pytest.mark.parametrize(("lanes", "most"), [(1, 1), (3, 3)])
def test_at_most_as_many_sessions_are_open_as_there_are_lanes(lanes: int, most: int) -> None:
    server = FakeServer()
    replay(server, [(block_run(str(i), block_turn(0, (1, 1)), block_turn(1)),) for i in range(9)], lanes=lanes)
    assert len(server.log) == 18
    assert server.most_open <= most


def test_tool_gaps_are_scaled_then_capped() -> None:
    async def gaps() -> list[float]:
        waited: list[float] = []
        original = asyncio.sleep

        async def sleep(seconds: float) -> None:
            waited.append(seconds)
            await original(0)

        server = FakeServer()
        gap_turns = [TurnTrace(prompt=TokensPrompt(add=(1,)), gap_ms=gap) for gap in (70.0, 100.0, 9000.0, None)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trunkline.bench.replay.asyncio.sleep", sleep)
            async with Endpoint("http://fake", transport=httpx.ASGITransport(app=server.app)) as endpoint:
                settings = ReplaySettings(model="m", gap_scale=0.5, gap_cap_ms=200, unknown_gap_ms=40, output_tokens=1)
                await Replay(endpoint, settings).play([(RunTrace(id="r", turns=tuple(gap_turns)),)])
        return [seconds for seconds in waited if seconds]

    assert asyncio.run(gaps()) == [0.05, 0.2, 0.02]


def test_a_refused_turn_ends_its_run_and_no_other() -> None:
    server = FakeServer(fail_at=(1,))
    events = replay(server, [(CHAT,), (chat_run("d", ("hello", "x")),)], lanes=1)
    runs = {event.run: event for event in events if isinstance(event, RunEvent)}
    assert runs["c"].turns == 1
    assert runs["c"].error is not None and "HTTP 400" in runs["c"].error and "too long" in runs["c"].error
    assert runs["d"].error is None
    summary = summarize(events)
    assert (summary.runs, summary.failed_runs, summary.turns) == (2, 1, 2)


def test_a_run_that_is_told_to_come_back_later_does_and_is_not_counted_twice() -> None:
    server = FakeServer()
    server.busy_at = (0, 1)
    events = replay(server, [(CHAT,)])
    turns = [event for event in events if isinstance(event, TurnEvent)]
    (run,) = [event for event in events if isinstance(event, RunEvent)]
    assert (run.error, run.turns, run.refusals) == (None, 3, 2)
    assert run.refused_ms > 0
    assert [turn.reusable_tokens == 0 for turn in turns] == [True, False, False]


def test_a_server_that_says_nothing_about_its_cache_gets_no_reuse_figure() -> None:
    summary = summarize(replay(FakeServer(reports_cache=False), [(CHAT,)]))
    assert (summary.reuse, summary.cached_share) == (None, None)
    assert "not reported" in show(summary)


@pytest.mark.parametrize("dialect", ["vllm", "llama"])
def test_sessions_that_do_not_fit_are_left_out_and_lengths_are_the_servers(dialect: str) -> None:
    longer = chat_run("long", ("word " * 30, "a b c d"))
    turn = TurnTrace(prompt=MessagesPrompt(add=(Message("user", "hi"),)), output="1 2 3 4 5")
    unknown = RunTrace(id="u", turns=(turn,))

    async def fitted() -> list[Session]:
        transport = httpx.ASGITransport(app=FakeServer(dialect).app)
        async with Endpoint("http://fake", transport=transport) as endpoint:
            return await fit(endpoint, [(longer,), (unknown,), FORKED], 35, 9)

    fits = asyncio.run(fitted())
    assert [session[0].id for session in fits] == ["u", "p"]
    assert fits[0][0].turns[0].output_tokens == 5


def test_filler_is_the_same_in_every_process_and_for_every_neighbour() -> None:
    filler = Filler(seed=7)
    assert filler.tokens("s", [1, 2], 3, "t", 1) == [2495, 1225, 4881, 4436, 8671, 3516, 8607]
    assert filler.tokens("s", [2], 3, "other", 0) == filler.tokens("s", [1, 2], 3, "t", 1)[3:6]
    assert filler.text("s", [1], 3, "t", 1) == " leave part name back"
    assert filler.text("s", [1, 2], 3, "u", 1).startswith(" leave part name ")
    assert Filler(seed=8).tokens("s", [1], 3, "t", 0) != filler.tokens("s", [1], 3, "t", 0)


def test_the_command_replays_a_file_and_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out, log = tmp_path / "t.jsonl", tmp_path / "out.json", tmp_path / "events.jsonl"
    write_runs(trace, [CHAT, *FORKED])
    with served(FakeServer()) as url:
        assert main(["--url", url, "--trace", str(trace), "--json", str(out), "--events", str(log)]) == 0
        assert main(["--url", url, "--trace", str(trace), "--max-context", "5"]) == 1
    summary = json.loads(out.read_text())
    assert (summary["runs"], summary["turns"], summary["reuse"]) == (4, 9, 1.0)
    events = read_events(log)
    assert len(events) == 13
    shown = capsys.readouterr()
    assert "4 (0 failed), 9 turns" in shown.out
    assert "fits 5 tokens; use --scale" in shown.err


def test_the_command_names_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_runs(tmp_path / "t.jsonl", [CHAT])
    assert main(["--url", "http://127.0.0.1:9", "--trace", str(tmp_path / "t.jsonl")]) == 1
    assert "127.0.0.1:9/v1/models" in capsys.readouterr().err


def test_tokenizing_without_a_tokenize_endpoint_says_what_needs_it() -> None:
    async def count() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(404))
        async with Endpoint("http://fake", transport=transport) as endpoint:
            await endpoint.tokenize_text("a")

    with pytest.raises(EndpointError, match="/tokenize answers 404"):
        asyncio.run(count())


class served:
    """A fake server on a free port for as long as the block lasts."""

    def __init__(self, fake: FakeServer) -> None:
        config = uvicorn.Config(fake.app, port=0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = Thread(target=self.server.run)

    def __enter__(self) -> str:
        self.thread.start()
        while not self.server.started:
            self.thread.join(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()


def test_tools_are_sent_and_counted_and_tool_calls_have_the_apis_shape() -> None:
    server = FakeServer()
    call = ToolCall("c1", "look", "{}")
    said = Message("assistant", "", (call,)), Message("tool", "found", tool_call_id="c1")
    turns_ = (
        TurnTrace(prompt=MessagesPrompt(add=(Message("user", "fix"),)), calls=(call,), output_tokens=2),
        TurnTrace(prompt=MessagesPrompt(keep=1, add=said), output_tokens=2),
    )
    run = RunTrace(id="t", turns=turns_, tools=(Tool("look", "d", {"type": "object"}),))
    replay(server, [(run,)])
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    assert [asked["tools"] for asked in server.log] == [[{"type": "function", "function": function}]] * 2
    wrote = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert server.log[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [wrote]},
        {"role": "tool", "content": "found", "tool_call_id": "c1"},
    ]


def test_sessions_of_one_id_space_share_blocks_and_named_tails_with_each_other() -> None:
    server = FakeServer()
    turn = TurnTrace(prompt=BlocksPrompt(add=((1, 3),), tail_tokens=2, tail_id=9), output_tokens=1)
    shared = [(RunTrace(id=name, block_tokens=4, turns=(turn,), space="s"),) for name in "ab"]
    own = [(RunTrace(id=name, block_tokens=4, turns=(turn,)),) for name in "cd"]
    events = turns(replay(server, [*shared, *own], lanes=1))
    assert [event.cached_tokens for event in events] == [0, 13, 0, 0]


def test_a_trace_of_any_known_format_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    request = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}
    path.write_text(json.dumps(request) + "\n" + json.dumps({**request, "timestamp": 9}) + "\n")
    with served(FakeServer()) as url:
        assert main(["--url", url, "--trace", str(path), "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["prompt_tokens"] == 1200
