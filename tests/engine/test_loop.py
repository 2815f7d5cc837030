"""The engine thread: what it records, whom it frees, and what it does when things go wrong."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.engine.served import Served, make_request, make_settings, some_tokens
from trunkline.core.types import MemoryKind, RunKey
from trunkline.engine.apply import Applier
from trunkline.engine.errors import DecodeFailed, MemoryFault, ModelError
from trunkline.engine.model import Model
from trunkline.wire.journal import Journal, replay
from trunkline.wire.turns import Accepted, Delta, Ended, Failed, TurnEvent


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread does."""

    async def poll() -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    asyncio.run(poll())


def test_recorded_facts_give_the_same_plans_again(smollm2: Model, tmp_path: Path) -> None:
    settings = make_settings(smollm2, slots=2, host_bytes=8_000_000)
    journal = Journal(tmp_path / "decisions.jsonl", settings)
    with Served(smollm2, settings, journal) as served:
        for turn in range(2):
            served.together([some_tokens(120 + 30 * turn, seed) for seed in range(4)], length=4)
        served.engine.reset_prefix_cache()
        served.engine.finish_run(RunKey("", served.runs[0]))
        served.serve(some_tokens(150, 1), length=4)
    journal.close()
    plans = list(replay(tmp_path / "decisions.jsonl"))
    assert len(plans) > 20
    assert all(logged == planned for logged, planned in plans)


def test_branches_of_one_prefix_compute_it_once(smollm2: Model) -> None:
    prefix = some_tokens(400)
    branches = [np.append(prefix, np.int32(30 + branch)) for branch in range(6)]
    with Served(smollm2, make_settings(smollm2)) as served:
        served.together(branches, length=4)
    assert sum(row.novel_tokens for row in served.rows) == 400 + 6


def test_a_seed_reproduces_and_another_differs(smollm2: Model) -> None:
    with Served(smollm2, make_settings(smollm2)) as served:
        first, again, other = (served.serve(some_tokens(50), seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_a_client_that_leaves_frees_its_slot_and_keeps_what_was_computed(smollm2: Model) -> None:
    prompt = some_tokens(200)

    async def leave() -> None:
        stream = served.engine.generate(make_request(prompt, "a", length=800))
        async for event in stream:
            if isinstance(event, Delta):
                break
        await stream.aclose()  # type: ignore[attr-defined]

    with Served(smollm2, make_settings(smollm2, slots=1)) as served:
        asyncio.run(leave())
        served.serve(np.append(prompt, np.int32(33)), "a", length=2)
    assert [row.finish_reason for row in served.rows] == ["aborted", "length"]
    assert served.rows[1].cached_tokens == 200


def test_two_turns_wait_for_one_slot(smollm2: Model) -> None:
    with Served(smollm2, make_settings(smollm2, slots=1)) as served:
        answers = served.together([some_tokens(100, seed) for seed in range(3)], length=6)
    assert [len(answer) for answer in answers] == [6, 6, 6]
    assert max(row.queue_ms for row in served.rows) > 0


def test_a_failed_decode_fails_its_turn_and_no_other(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = Applier.call, iter([True])

    def failing(self: Applier, call: object, live: object) -> float:
        if next(failures, False):
            raise DecodeFailed(1, "made to fail", [])
        return real(self, call, live)  # type: ignore[arg-type]

    with Served(smollm2, make_settings(smollm2)) as served:
        monkeypatch.setattr(Applier, "call", failing)
        assert isinstance(last_event(served, "a"), Failed)
        served.serve(some_tokens(60), "b", length=3)
    assert [row.finish_reason for row in served.rows] == ["failed", "length"]


def test_a_load_that_fails_is_recomputed_and_counted(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(smollm2, make_settings(smollm2, slots=1)) as served:
        expected = [served.serve(some_tokens(150), "a", length=4)]
        served.serve(some_tokens(150, 1), "b", length=4)

        def failing(*_: object) -> None:
            raise MemoryFault("made to fail")

        with monkeypatch.context() as patch:
            patch.setattr(served.slots, "load", failing)
            answer = served.serve(some_tokens(150), "a", length=4)
        gauges = served.engine.gauges()
    assert answer == expected[0]
    assert gauges["broken_promises_total"] == 149


def test_after_an_unforeseen_error_the_engine_starts_over(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = Applier.move, iter([True])

    def failing(self: Applier, move: object) -> object:
        if next(failures, False):
            raise MemoryFault("made to fail")
        return real(self, move)  # type: ignore[arg-type]

    with Served(smollm2, make_settings(smollm2, slots=1)) as served:
        served.serve(some_tokens(150), "a", length=4)
        monkeypatch.setattr(Applier, "move", failing)
        failed = last_event(served, "b", some_tokens(150, 1))
        served.serve(some_tokens(150), "a", length=4)
    assert isinstance(failed, Failed)
    assert failed.code == "engine_restarted"
    last = served.rows[-1]
    assert (last.index, [miss.reason for miss in last.misses]) == (1, ["node_restarted"])


def last_event(
    served: Served, run: str, tokens: "np.ndarray[tuple[int], np.dtype[np.int32]] | None" = None
) -> TurnEvent:
    """The event that ended a turn."""

    async def follow() -> TurnEvent:
        prompt = some_tokens(60) if tokens is None else tokens
        events = [event async for event in served.engine.generate(make_request(prompt, run, 3))]
        assert isinstance(events[0], Accepted)
        return events[-1]

    return asyncio.run(follow())


def test_an_edited_history_says_in_words_where(smollm2: Model) -> None:
    with Served(smollm2, make_settings(smollm2)) as served:
        first = served.engine.tokenize("The quick brown fox jumps over the lazy dog.", salt="")
        second = served.engine.tokenize("The quick brown cat jumps over the lazy dog.", salt="")
        served.serve(first, "a", length=2)
        served.serve(second, "a", length=2)
    (miss,) = [miss for miss in served.rows[1].misses if miss.reason == "history_edited"]
    assert "fox" in miss.detail
    assert "cat" in miss.detail


def test_parallel_agents_whose_first_line_changes_are_told_what_kept_them_apart(smollm2: Model) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.104.583; cc_entrypoint=cli; cch={};\nYou are a careful agent."
    task = (
        " You read files, you change them as little as you can, and you run the tests before you say that you are done."
    )
    with Served(smollm2, make_settings(smollm2)) as served:
        for run, cch in (("a", "1f3a9"), ("b", "22bcd")):
            served.serve(served.engine.tokenize(line.format(cch) + task, salt=""), run, length=2)
    first, second = served.rows
    assert first.diff is None
    assert second.diff is not None
    assert (second.diff.run, second.diff.culprit) == ("a", "billing")
    assert second.diff.before.endswith("cc_entrypoint=cli; cch=")
    assert (second.diff.was, second.diff.now) == ("1f3a9", "22bcd")
    assert second.diff.after.startswith(";\nYou are a careful agent. You read files")


def test_ended_events_carry_the_row_that_was_recorded(smollm2: Model) -> None:
    with Served(smollm2, make_settings(smollm2)) as served:
        event = last_event(served, "a")
    assert isinstance(event, Ended)
    assert event.row is served.rows[0]
    total = event.row.queue_ms + event.row.prefill_ms + event.row.decode_ms
    assert total == pytest.approx(event.row.latency_ms)


def test_a_sliding_window_reuses_checkpoints(gemma: Model) -> None:
    settings = make_settings(gemma, slots=1, slot_tokens=2048)
    assert settings.memory is MemoryKind.CHECKPOINTS
    prompt, stranger = some_tokens(700), some_tokens(700, 1)  # longer than the window
    longer = np.append(prompt, some_tokens(20, 2))
    with Served(gemma, settings) as served:
        served.serve(prompt, "a", length=4)
        served.serve(stranger, "b", length=4)
        parked = served.serve(longer, "a", length=4)
        rows = list(served.rows)
    with Served(gemma, settings) as fresh:
        fresh.serve(prompt, "a", length=4)
        never_left = fresh.serve(longer, "a", length=4)
    assert rows[2].cached_tokens == 699
    assert parked == never_left


def test_a_model_without_a_tokenizer_is_refused(mamba: Model) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        Served(mamba, make_settings(mamba, slot_tokens=64))


def test_a_decision_log_replays_past_a_start_over(
    smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(smollm2, slots=1)
    journal = Journal(tmp_path / "decisions.jsonl", settings)
    with Served(smollm2, settings, journal) as served:
        served.serve(some_tokens(60), "a", length=3)
        with monkeypatch.context() as patch:
            patch.setattr(Applier, "call", lambda *_: 1 / 0)
            assert isinstance(last_event(served, "b"), Failed)
        wait_until(lambda: served.engine.gauges()["engine_start_overs_total"] == 1)
        served.serve(some_tokens(60), "a", length=3)
    journal.close()
    plans = list(replay(tmp_path / "decisions.jsonl"))
    assert all(logged == planned for logged, planned in plans)


def test_an_engine_that_cannot_start_over_says_so_and_keeps_nobody_waiting(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(smollm2, make_settings(smollm2)) as served:
        monkeypatch.setattr(Applier, "call", lambda *_: 1 / 0)
        monkeypatch.setattr(Applier, "empty", lambda *_: 1 / 0)
        assert isinstance(last_event(served, "a"), Failed)
        wait_until(lambda: served.engine.ready() is not None)

        async def next_turn() -> list[TurnEvent]:
            return [event async for event in served.engine.generate(make_request(some_tokens(20), "b", 2))]

        (event,) = asyncio.run(next_turn())
    assert isinstance(event, Failed)


def test_gauges_are_true_while_nothing_runs(smollm2: Model) -> None:
    with Served(smollm2, make_settings(smollm2)) as served:
        served.serve(some_tokens(60), "a", length=3)
        wait_until(lambda: served.engine.gauges().get("running") == 0)
        assert served.engine.gauges()["waiting"] == 0


def test_a_turn_that_ends_in_the_queue_says_so(smollm2: Model) -> None:
    async def leave_the_queue() -> None:
        busy = asyncio.create_task(served.turn(some_tokens(60), "a", 300))
        await asyncio.sleep(0.2)
        waiting = served.engine.generate(make_request(some_tokens(80, 1), "b", 4))
        assert isinstance(await anext(waiting), Accepted)
        await waiting.aclose()  # type: ignore[attr-defined]
        await busy

    with Served(smollm2, make_settings(smollm2, slots=1)) as served:
        asyncio.run(leave_the_queue())
    (row,) = [row for row in served.rows if row.finish_reason == "aborted"]
    assert [(miss.reason, miss.tokens) for miss in row.misses] == [("ended_in_queue", 80)]
    assert row.reusable_tokens == 0
