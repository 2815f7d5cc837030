"""What stays in host memory when not everything can."""

from tests.core.helpers import make_engine, tokens
from trunkline.core.facts import RunFinished
from trunkline.core.types import Eviction, RunKey


def test_a_runs_context_survives_others_as_long_as_there_is_room() -> None:
    engine = make_engine(slots=1)
    engine.serve(tokens(200), run="a", length=1)
    for other in range(5):
        engine.serve(tokens(200, 1000 * (other + 1)), run=f"o{other}", length=1)
    assert engine.serve([*tokens(200), 1], run="a").cached_tokens == 200
    assert engine.deaths == []


def test_a_superseded_branch_goes_before_an_open_runs_context() -> None:
    engine = make_engine(slots=1, host_bytes=450_000)
    engine.serve([*tokens(100), *tokens(100, 7000)], run="a", length=1)
    engine.serve([*tokens(100), *tokens(100, 8000)], run="a", length=1)  # the first tail is superseded
    engine.serve(tokens(100, 1000), run="b", length=1)
    engine.serve(tokens(100, 2000), run="c", length=1)
    engine.serve(tokens(100, 3000), run="d", length=1)
    assert engine.serve([*tokens(100), *tokens(100, 8000), 1], run="a").cached_tokens == 200


def test_a_finished_runs_context_goes_first() -> None:
    engine = make_engine(slots=1, host_bytes=250_000)
    engine.serve(tokens(100), run="a", length=1)
    engine.serve(tokens(100, 1000), run="b", length=1)
    engine.core.handle(RunFinished(at_ms=engine.now_ms, key=RunKey("", "b")))
    engine.serve(tokens(100, 2000), run="c", length=1)
    engine.serve(tokens(100, 3000), run="d", length=1)
    assert engine.serve([*tokens(100), 1], run="a").cached_tokens == 100


def test_a_prefix_that_many_runs_share_outlives_one_that_a_single_run_uses() -> None:
    engine = make_engine(slots=1, host_bytes=420_000)
    for branch in range(3):
        engine.serve([*tokens(100), 5000 + branch], run=f"s{branch}", length=1)
    engine.serve(tokens(100, 1000), run="alone", length=1)
    for other in range(3):
        engine.serve(tokens(100, 2000 + 1000 * other), run=f"o{other}", length=1)
    assert engine.serve([*tokens(100), 9], run="new").cached_tokens == 100


def test_lru_forgets_the_longest_unused_whoever_shares_it() -> None:
    engine = make_engine(slots=1, host_bytes=320_000, eviction=Eviction.LRU)
    for branch in range(3):
        engine.serve([*tokens(100), 5000 + branch], run=f"s{branch}", length=1)
    for other in range(4):
        engine.serve(tokens(100, 1000 + 1000 * other), run=f"o{other}", length=1)
    assert engine.serve([*tokens(100), 9], run="new").cached_tokens == 0


def test_nothing_that_a_turn_in_flight_stands_on_is_dropped() -> None:
    engine = make_engine(slots=2, host_bytes=300_000)
    engine.serve(tokens(200), run="a", length=1)
    engine.serve(tokens(90, 1000), run="b", length=1)
    engine.arrive([*tokens(200), 1], run="a", length=30)
    for other in range(4):
        engine.arrive(tokens(90, 2000 + 1000 * other), run=f"o{other}", length=2)
    engine.run_all()
    assert engine.core.state.broken_promises == 0
    record = next(record for record in engine.records if record.run.run == "a" and record.index == 1)
    assert record.cached_tokens == 200


def test_without_host_memory_a_run_is_served_from_its_warm_slot() -> None:
    engine = make_engine(slots=2, host_bytes=0)
    engine.serve(tokens(200), run="a", length=1)
    assert engine.serve([*tokens(200), 1], run="a").cached_tokens == 200
