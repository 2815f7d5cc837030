"""What stays in host memory when not everything can."""

from tests.core.helpers import make_engine, tokens
from trunkline.core.facts import RunFinished
from trunkline.core.types import Eviction, RunKey, TurnRecord


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


def test_slots_and_host_memory_add_up() -> None:
    engine = make_engine(slots=2, host_bytes=800_000)
    for turn in range(4):
        for run in range(5):
            history = engine.histories.get(f"r{run}", tokens(180, 1000 * run))
            record = engine.serve([*history, 1][:200], run=f"r{run}", length=1)
            assert turn == 0 or record.cached_tokens >= record.reusable_tokens - 1


def test_where_more_runs_take_turns_than_memory_holds_some_keep_all_they_had() -> None:
    def reuse(eviction: Eviction) -> float:
        engine = make_engine(slots=1, host_bytes=600_000, eviction=eviction)
        records: list[TurnRecord] = []
        for _ in range(6):
            for run in range(8):
                engine.now_ms += 1000
                records.append(engine.serve([*tokens(200, 1000 * run), len(records)], run=f"r{run}", length=1))
        later = records[8:]
        return sum(r.cached_tokens for r in later) / sum(r.reusable_tokens for r in later)

    assert reuse(Eviction.VALUE) > 0.3
    assert reuse(Eviction.LRU) < 0.1


def test_a_run_that_stays_away_gives_way() -> None:
    engine = make_engine(slots=1, host_bytes=250_000)
    engine.serve(tokens(200), run="away", length=1)
    engine.serve(tokens(200, 1000), run="b", length=1)
    engine.now_ms += 600_000
    for _ in range(3):
        engine.serve([*tokens(200, 1000), 1], run="b", length=1)
        engine.serve([*tokens(200, 2000), 1], run="c", length=1)
    assert engine.serve([*tokens(200, 1000), 1, 2], run="b").cached_tokens >= 200
