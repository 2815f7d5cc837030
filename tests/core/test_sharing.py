"""What is shared, what a fork costs, and what a turn is told about its misses."""

import numpy as np
import pytest

from tests.core.helpers import make_engine, make_settings, tokens
from trunkline.core import actions as act
from trunkline.core.facts import CacheReset, RunRestored, TurnArrived
from trunkline.core.policy import Core
from trunkline.core.types import EndReason, MemoryKind, MissReason, Prompt, RunKey, Sharing, TurnRecord


def reasons(record: TurnRecord) -> dict[MissReason, int]:
    return {miss.reason: miss.tokens for miss in record.misses}


def test_the_next_turn_of_a_run_reuses_prompt_and_answer() -> None:
    engine = make_engine()
    engine.serve(tokens(100), run="a", length=5)
    history = engine.histories["a"]
    record = engine.serve([*history, 1, 2, 3], run="a")
    assert record.cached_tokens == 104  # the fifth generated token was never decoded
    assert record.reusable_tokens == 104
    assert reasons(record) == {MissReason.NEVER_SEEN: 4}


def test_the_same_prompt_again_computes_its_last_token_only() -> None:
    engine = make_engine()
    engine.serve(tokens(100), run="a")
    record = engine.serve(tokens(100), run="b")
    assert reasons(record) == {MissReason.LAST_TOKEN: 1}


def test_concurrent_branches_compute_a_shared_prefix_once() -> None:
    engine = make_engine(slots=8, max_slice_tokens=64)
    for branch in range(8):
        engine.arrive([*tokens(1000), 5000 + branch, 1, 2])
    engine.run_all()
    computed = sum(c.end - c.start for plan in engine.plans for c in plan.calls if isinstance(c, act.Prefill))
    assert computed == 1000 + 8 * 3
    assert sorted(record.cached_tokens for record in engine.records) == [0] + [1000] * 7


def test_more_branches_than_slots_still_share() -> None:
    engine = make_engine(slots=2, max_slice_tokens=64)
    for branch in range(6):
        engine.arrive([*tokens(1000), 5000 + branch])
    engine.run_all()
    assert sum(record.novel_tokens for record in engine.records) == 1000 + 6


def test_a_prefix_whose_computing_turn_was_aborted_is_computed_by_the_next() -> None:
    engine = make_engine(max_slice_tokens=64)
    first = engine.arrive([*tokens(1000), 1])
    engine.arrive([*tokens(1000), 2])
    engine.step()
    engine.step()
    computed = engine.core.state.turns[first].computed
    engine.end(first, EndReason.ABORTED)
    engine.run_all()
    assert engine.records[-1].cached_tokens == computed > 0


def test_what_an_aborted_turn_computed_is_kept() -> None:
    engine = make_engine(max_slice_tokens=64)
    turn = engine.arrive(tokens(1000), run="a")
    engine.step()
    engine.step()
    computed = engine.core.state.turns[turn].computed
    engine.end(turn, EndReason.ABORTED)
    assert engine.serve(tokens(1000), run="a").cached_tokens == computed > 0


def test_with_sharing_off_nothing_is_reused_and_the_reason_says_so() -> None:
    engine = make_engine(sharing=Sharing.OFF)
    engine.serve(tokens(100), run="a")
    record = engine.serve([*engine.histories["a"], 1], run="a")
    assert record.cached_tokens == 0
    assert record.reusable_tokens == 103
    assert reasons(record) == {MissReason.SHARING_OFF: 103, MissReason.NEVER_SEEN: 2}


def test_keys_are_isolated() -> None:
    engine = make_engine()
    engine.serve(tokens(100), salt="a")
    record = engine.serve(tokens(100), salt="b")
    assert record.cached_tokens == record.reusable_tokens == 0


def test_an_edited_history_shows_where_it_left_the_old_one() -> None:
    engine = make_engine()
    engine.serve(tokens(100), run="a", length=1)
    edited = tokens(100)
    edited[40] = 7
    record = engine.serve(edited, run="a")
    (miss,) = [m for m in record.misses if m.reason is MissReason.HISTORY_EDITED]
    assert (miss.at_token, miss.was[0], miss.now[0]) == (40, 50, 7)
    assert record.cached_tokens == 40


def test_a_drop_is_announced_to_the_runs_it_hurts_and_shown_in_their_next_turn() -> None:
    engine = make_engine(slots=1, host_bytes=0)
    engine.serve(tokens(100), run="a", length=1)
    engine.serve(tokens(100, 1000), run="b", length=1)
    (notice,) = [notice for notice in engine.deaths if RunKey("", "a") in notice.runs]
    record = engine.serve([*tokens(100), 1], run="a")
    (miss,) = [m for m in record.misses if m.reason is MissReason.EVICTED]
    assert (miss.decision, miss.tokens) == (notice.decision, 100)


def test_a_reset_forgets_everything_but_turns_in_flight() -> None:
    engine = make_engine()
    engine.serve(tokens(100), run="a")
    engine.arrive(tokens(50, 500), run="b", length=6)
    engine.step()
    engine.apply_actions(engine.core.handle(CacheReset(at_ms=engine.now_ms)))
    engine.run_all()
    assert reasons(engine.serve(tokens(100), run="a"))[MissReason.CACHE_RESET] > 0
    assert engine.serve([*tokens(50, 500), 1], run="b").cached_tokens == 50


def test_a_restarted_process_is_named_as_the_reason() -> None:
    engine = make_engine()
    engine.core.handle(RunRestored(at_ms=0.0, key=RunKey("", "a"), parent=None, turns=3, prompt_tokens=80))
    record = engine.serve(tokens(100), run="a")
    assert record.index == 3
    assert reasons(record) == {MissReason.NODE_RESTARTED: 80, MissReason.NEVER_SEEN: 20}


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    engine = make_engine()
    engine.serve(tokens(100))
    record = engine.serve(tokens(100), logprobs=True)
    assert reasons(record) == {MissReason.PROMPT_LOGPROBS: 100}


def test_a_failed_load_is_a_broken_promise_and_the_turn_still_finishes() -> None:
    engine = make_engine(slots=1)
    engine.serve(tokens(100), run="a")
    engine.serve(tokens(100, 1000), run="b")
    engine.fail_next_load = True
    record = engine.serve([*engine.histories["a"], 1], run="a")
    assert record.recomputed_tokens == engine.core.state.broken_promises == 103
    assert record.cached_tokens == 0
    assert record.reason is EndReason.LENGTH


def test_a_failed_call_fails_its_turn_alone() -> None:
    engine = make_engine()
    engine.serve(tokens(100), run="a")
    engine.fail_next_call = True
    assert engine.serve(tokens(100, 1000), run="b").reason is EndReason.FAILED
    assert engine.serve([*engine.histories["a"], 1], run="a").cached_tokens == 103


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    engine = make_engine()
    engine.arrive(tokens(4090), max_new=10)
    (refusal,) = engine.refused
    assert "4090" in refusal.why
    assert "4096" in refusal.why


@pytest.mark.parametrize("fork_at", [30, 70])
def test_checkpoint_memory_reuses_where_prompts_forked_before(fork_at: int) -> None:
    engine = make_engine(memory=MemoryKind.CHECKPOINTS)
    base = tokens(100)
    engine.serve([*base[:fork_at], 1, 1], run="a")
    engine.serve([*base[:fork_at], 2, 2], run="b")  # the fork is known now: its state is saved in passing
    record = engine.serve([*base[:fork_at], 3, 3], run="c")
    assert record.cached_tokens == fork_at


def test_checkpoint_memory_serves_a_longer_prompt_and_the_same_one_again() -> None:
    engine = make_engine(memory=MemoryKind.CHECKPOINTS)
    engine.serve(tokens(100), run="a")
    assert engine.serve(tokens(100), run="a").cached_tokens == 99
    assert engine.serve([*tokens(100), 1, 2], run="a").cached_tokens == 99


def test_blocks_are_shared_like_tokens() -> None:
    """A trace without tokens has block ids; they weigh what they stand for."""
    core = Core(make_settings())
    for turn, ids in enumerate(([1, 2, 3], [1, 2, 4])):
        weights = np.array([64, 64, 10], np.int32)
        blocks = Prompt(np.array(ids, np.int32), weights)
        core.handle(TurnArrived(at_ms=0.0, turn=turn, salt="", prompt=blocks, max_new_tokens=1, fresh=f"f{turn}"))
    assert core.state.turns[1].record.reusable_tokens == 128


def test_a_slot_that_a_queued_turn_will_go_on_in_is_left_to_it() -> None:
    engine = make_engine(slots=2, host_bytes=0)
    engine.serve(tokens(200), run="a", length=1)
    engine.serve(tokens(200, 1000), run="b", length=1)
    engine.arrive(tokens(50, 5000), run="new", length=8)
    engine.arrive([*tokens(200, 1000), 1], run="b")
    engine.run_all()
    record = next(record for record in engine.records if record.run.run == "b" and record.index == 1)
    assert record.cached_tokens == 200


def test_what_host_memory_cannot_take_is_served_from_the_slot_that_holds_it() -> None:
    engine = make_engine(slots=2, host_bytes=0)
    engine.serve(tokens(300), run="a", length=1)
    assert engine.serve([*tokens(250), 1, 2], run="b").cached_tokens == 250


def test_a_reset_leaves_a_queued_turn_what_it_stands_on() -> None:
    engine = make_engine(slots=2)
    engine.serve(tokens(200), run="a", length=1)
    engine.arrive([*tokens(200), 1], run="a")
    engine.apply_actions(engine.core.handle(CacheReset(at_ms=engine.now_ms)))
    engine.run_all()
    assert engine.records[-1].cached_tokens == 200


def test_a_death_names_open_runs_only() -> None:
    engine = make_engine(slots=1, host_bytes=0)
    engine.serve([*tokens(100), 1], run="over", length=1, final=True)
    engine.serve([*tokens(100), 2], run="open", length=1)
    for stranger in range(3):
        engine.serve(tokens(100, 1000 * (stranger + 1)), run=f"s{stranger}", length=1)
    named = {key.run for notice in engine.deaths for key in notice.runs}
    assert "open" in named
    assert "over" not in named


def test_a_load_that_fails_where_a_slot_still_holds_the_prefix_breaks_no_promise() -> None:
    engine = make_engine(slots=2)
    engine.serve(tokens(200), run="a", length=1)
    engine.serve([*tokens(200), 1, 2], run="b", length=1)
    engine.arrive([*tokens(200), 1, 2, 9], run="b", length=30)
    engine.step()
    engine.fail_next_load = True
    engine.arrive([*tokens(200), 3, 3], run="c")
    engine.run_all()
    record = next(record for record in engine.records if record.run.run == "c")
    assert record.cached_tokens == 200
    assert engine.core.state.broken_promises == record.recomputed_tokens == 0


def test_reuse_never_exceeds_what_was_reusable() -> None:
    engine = make_engine(slots=2, max_slice_tokens=64)
    engine.serve(tokens(20, 9000), run="short", length=1)
    for _ in range(3):
        engine.arrive(tokens(400), length=1)
    engine.run_all()
    assert all(record.cached_tokens <= record.reusable_tokens for record in engine.records)
