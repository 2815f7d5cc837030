"""Who is placed first when slots are short."""

from tests.core.fake_engine import FakeEngine
from tests.core.helpers import make_engine, tokens
from trunkline.core.facts import CacheReset
from trunkline.core.policy import LOOP_BONUS_MS, RECOMPUTE_MOST_MS, SHORT_BONUS_MS
from trunkline.core.types import Order


def two_runs_of_which_one_is_held(**settings: object) -> FakeEngine:
    """Runs `cold` and `held` have each had a turn of 2,000 tokens, and one slot holds what is left: `held`'s."""
    engine = make_engine(slots=1, **settings)
    engine.serve(tokens(2000, 10_000), run="cold", length=100)
    engine.apply_actions(engine.core.handle(CacheReset(at_ms=engine.now_ms)))
    engine.serve(tokens(2000, 20_000), run="held", length=100)
    return engine


def arrive_again(engine: FakeEngine, run: str) -> int:
    """The run's next turn: its history and something new."""
    return engine.arrive([*engine.histories[run], 1, 2, 3], run=run, length=100)


def served(engine: FakeEngine) -> list[str]:
    """Runs in the order in which their last two turns ended."""
    return [record.run.run for record in engine.records[-2:]]


def test_a_turn_whose_history_is_held_goes_before_one_that_would_be_computed_again() -> None:
    engine = two_runs_of_which_one_is_held()
    arrive_again(engine, "cold")
    arrive_again(engine, "held")
    engine.run_all()
    assert served(engine) == ["held", "cold"]


def test_first_come_first_served_does_not_look_at_what_is_held() -> None:
    engine = two_runs_of_which_one_is_held(order=Order.FCFS)
    arrive_again(engine, "cold")
    arrive_again(engine, "held")
    engine.run_all()
    assert served(engine) == ["cold", "held"]


def test_what_was_held_when_a_turn_came_and_was_lost_while_it_waited_does_not_count() -> None:
    engine = two_runs_of_which_one_is_held(host_bytes=0)
    arrive_again(engine, "cold")
    engine.now_ms += RECOMPUTE_MOST_MS + 1000
    arrive_again(engine, "held")
    engine.step()  # the older one takes the only slot
    engine.arrive(tokens(500, 30_000), run="branch", parent="held", length=100)
    engine.run_all()
    assert served(engine) == ["branch", "held"]


def test_a_stream_of_held_turns_does_not_keep_a_cold_one_waiting_for_ever() -> None:
    engine = two_runs_of_which_one_is_held(host_bytes=0)
    cold = arrive_again(engine, "cold")
    arrived_ms = engine.now_ms
    branches = 0
    while cold in engine.jobs and not engine.core.state.turns[cold].computed:
        if len(engine.jobs) < 3:
            branches += 1
            engine.arrive([*tokens(2000, 20_000), branches], run=f"branch {branches}", parent="held", length=20)
        engine.step()
    assert branches > 10
    assert engine.now_ms - arrived_ms < RECOMPUTE_MOST_MS + LOOP_BONUS_MS + SHORT_BONUS_MS + 5000


def test_a_turn_that_overtakes_another_does_not_miss_what_both_share() -> None:
    engine = make_engine()
    engine.arrive([*tokens(200), *tokens(300, 5000)], run="long")
    engine.arrive([*tokens(200), 7000], run="short")
    engine.run_all()
    first, second = engine.records
    assert [first.run.run, second.run.run] == ["short", "long"]
    assert (first.cached_tokens, first.reusable_tokens) == (0, 0)
    assert (second.cached_tokens, second.reusable_tokens) == (200, 200)
