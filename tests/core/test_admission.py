"""Which new runs are let in: what is promised, and what the prediction knows."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.fake_engine import FakeEngine
from tests.core.helpers import PER_TOKEN, make_engine, tokens
from trunkline.core.actions import RunAdmitted, RunRefused
from trunkline.core.closed_loop import Engine, Mix, lost_share, pace
from trunkline.core.facts import RunDeclared, RunFinished
from trunkline.core.habits import PRIOR_END, Endings, Gaps, Kinds
from trunkline.core.pauses import PAUSE_MOST_MS
from trunkline.core.types import Admission, EndReason, RefusalReason, RunKey, ServiceClass


def admitting(mode: Admission, **changes: Any) -> FakeEngine:
    """An engine with one slot a run and no host memory, so that a second or third run is one too many."""
    values: dict[str, Any] = {"slots": 2, "host_bytes": 0, "max_wait_ms": 0.0, "stretch_objective": 1.5}
    return make_engine(admission=mode, **(values | changes))


def learn(engine: FakeEngine, runs: int = 12, turns: int = 6) -> None:
    """Runs come and go one after another, so that their habits are known."""
    for number in range(runs):
        history = tokens(600, 10_000 * (number + 1))
        for _ in range(turns):
            engine.serve(history, run=f"past-{number}", length=10)
            history = [*engine.histories[f"past-{number}"], *tokens(60, len(history))]
            engine.now_ms += 300
        engine.apply_actions(engine.core.handle(RunFinished(at_ms=engine.now_ms, key=RunKey("", f"past-{number}"))))


def begin(engine: FakeEngine, name: str, *, length: int = 10, **options: Any) -> int:
    """A new run's first turn."""
    return engine.arrive(
        tokens(600, 1_000_000 + 10_000 * len(engine.plans) + 7 * sum(name.encode())), run=name, length=length, **options
    )


def crowd(engine: FakeEngine, count: int) -> list[str]:
    """So many runs ask to be let in, one after another; each that is serves its first turn. Returns those that were."""
    begun = []
    for number in range(count):
        before = len(engine.refused)
        begin(engine, f"new-{number}")
        engine.run_all()
        if len(engine.refused) == before:
            begun.append(f"new-{number}")
    return begun


def test_without_admission_everybody_is_let_in() -> None:
    engine = admitting(Admission.OFF)
    learn(engine)
    assert len(crowd(engine, 10)) == 10


def test_a_run_that_would_displace_others_is_refused_with_its_footprint_and_when_to_come_back() -> None:
    engine = admitting(Admission.PREDICTED)
    learn(engine)
    begun = crowd(engine, 10)
    assert 2 <= len(begun) < 10
    refusal = engine.refused[0]
    assert refusal.retry_after_s is not None and refusal.retry_after_s >= 1
    assert refusal.reason in (RefusalReason.MEMORY, RefusalReason.SPEED)
    assert "turns and" in refusal.why and "try again in" in refusal.why


def test_few_runs_are_never_refused_whatever_is_known() -> None:
    engine = admitting(Admission.PREDICTED, slots=4, host_bytes=100_000 * PER_TOKEN, stretch_objective=8.0)
    assert len(crowd(engine, 4)) == 4


def test_an_admitted_run_a_sub_agent_and_a_branch_are_let_in_however_full_it_is() -> None:
    engine = admitting(Admission.PREDICTED)
    learn(engine)
    begun = crowd(engine, 10)
    assert engine.refused
    refused = len(engine.refused)
    for name in begun:
        engine.arrive([*engine.histories[name], 1, 2, 3], run=name)
        engine.arrive(tokens(100, 5), run=f"{name}/sub", parent=name)
    engine.run_all()
    for name in begun:
        engine.arrive([*engine.histories[name][:611], 9, 9, 9])  # nothing names it: its prompt tells
    engine.run_all()
    assert len(engine.refused) == refused


def test_a_refused_run_is_let_in_when_others_have_ended() -> None:
    engine = admitting(Admission.PREDICTED)
    learn(engine)
    begun = crowd(engine, 10)
    for name in begun:
        engine.apply_actions(engine.core.handle(RunFinished(at_ms=engine.now_ms, key=RunKey("", name))))
    refused = len(engine.refused)
    begin(engine, "again")
    engine.run_all()
    assert len(engine.refused) == refused


def test_a_run_that_may_wait_is_served_when_there_is_room_and_not_before() -> None:
    engine = admitting(Admission.RUNS_CAP, admission_cap=1, max_wait_ms=1e9)
    begin(engine, "one", length=3)
    engine.run_all()
    second = begin(engine, "two", length=3)
    for _ in range(50):
        engine.step()
    assert second in engine.jobs, "it waits"
    assert not engine.refused
    engine.apply_actions(engine.core.handle(RunFinished(at_ms=engine.now_ms, key=RunKey("", "one"))))
    engine.run_all()
    assert engine.records[-1].run.run == "two"
    assert engine.records[-1].waited_ms > 0


def test_the_line_is_bounded_for_each_class() -> None:
    engine = admitting(Admission.RUNS_CAP, admission_cap=1, max_wait_ms=1e9, max_waiting_runs=3)
    begin(engine, "one")
    for number in range(6):
        begin(engine, f"more-{number}")
    assert len(engine.refused) == 3
    assert engine.refused[0].reason is RefusalReason.CAP
    assert len(engine.core.state.admission.waiting) == 3


def test_a_client_that_leaves_the_line_has_not_been_let_in() -> None:
    engine = admitting(Admission.RUNS_CAP, admission_cap=1, max_wait_ms=1e9, max_waiting_runs=1)
    begin(engine, "one")
    engine.end(begin(engine, "two"), EndReason.ABORTED)
    assert not engine.core.state.admission.waiting
    begin(engine, "three")
    begin(engine, "two")
    assert [refusal.reason for refusal in engine.refused] == [RefusalReason.CAP]


def test_a_cap_on_turns_counts_turns_in_flight() -> None:
    engine = admitting(Admission.TURNS_CAP, admission_cap=2)
    begin(engine, "one")
    begin(engine, "two")
    begin(engine, "three")
    assert len(engine.refused) == 1
    engine.run_all()
    begin(engine, "four")
    assert len(engine.refused) == 1


def test_a_run_that_waited_far_too_long_is_let_in_though_nobody_left() -> None:
    engine = admitting(Admission.PREDICTED, max_wait_ms=30_000.0)
    learn(engine)
    waiting = None
    for number in range(12):
        before = len(engine.core.state.admission.waiting)
        turn = begin(engine, f"new-{number}", length=3)
        if len(engine.core.state.admission.waiting) > before:
            waiting = turn
            break
        engine.run_all()
    assert waiting is not None
    for _ in range(400):
        if waiting not in engine.jobs:
            break
        engine.now_ms += 20_000
        for name in [f"new-{number}" for number in range(12)]:
            if name in engine.histories and not any(job.run == name for job in engine.jobs.values()):
                engine.arrive([*engine.histories[name][:2000], 1], run=name, length=2)
        engine.step()
    assert waiting not in engine.jobs


def declare(engine: FakeEngine, name: str, **options: Any) -> Any:
    (action,) = engine.core.handle(RunDeclared(at_ms=engine.now_ms, key=RunKey("", name), **options))
    return action


def test_a_declared_run_is_let_in_or_refused_at_once_and_its_turns_are_not_asked_again() -> None:
    engine = admitting(Admission.RUNS_CAP, admission_cap=1)
    first = declare(engine, "one", expected_turns=30, expected_tokens=3000)
    assert isinstance(first, RunAdmitted)
    assert not first.waits
    assert (first.turns, first.peak_tokens) == (30, 3000)
    second = declare(engine, "two")
    assert isinstance(second, RunRefused)
    assert second.retry_after_s >= 1
    begin(engine, "one")
    assert not engine.refused
    begin(engine, "two")
    assert len(engine.refused) == 1


def test_batch_runs_wait_where_interactive_ones_are_refused() -> None:
    engine = admitting(Admission.RUNS_CAP, admission_cap=1, max_wait_ms=60_000.0)
    learn(engine, runs=6, turns=40)
    begin(engine, "one")
    engine.run_all()
    interactive = declare(engine, "now")
    batch = declare(engine, "later", service=ServiceClass.BATCH)
    assert isinstance(batch, RunAdmitted)
    assert batch.waits
    assert isinstance(interactive, RunRefused | RunAdmitted)


# --- what is learned ------------------------------------------------------------------------------------------------


def test_the_expected_turns_left_depend_on_the_turns_behind() -> None:
    endings = Endings()
    for number in range(60):
        last = 2 if number % 2 else 40
        for turn in range(1, last + 1):
            endings.took(turn)
        endings.ended(last)
    assert endings.left(0) == pytest.approx(21, rel=0.4)
    assert endings.left(10) == pytest.approx(30, rel=0.5)
    assert endings.left(10) > endings.left(0)
    assert 0 < endings.survives(2, 30) < 1
    assert endings.survives(2, 30) < endings.survives(2, 5)


def test_a_kind_that_nobody_saw_has_everyones_habits() -> None:
    kinds = Kinds()
    known = kinds.of("known")
    for _ in range(50):
        known.saw("gap_ms", 40_000.0)
        known.gaps.saw(40_000.0)
    fresh = kinds.of("fresh")
    assert fresh.mean("gap_ms") == pytest.approx(known.mean("gap_ms"), rel=0.2)
    assert fresh.gaps.longer(10_000.0) > 0.8
    assert fresh.endings.chance(1) == pytest.approx(PRIOR_END)


def test_gaps_that_were_never_so_long_make_silence_mean_the_end() -> None:
    gaps = Gaps()
    for _ in range(200):
        gaps.saw(500.0)
    assert gaps.longer(100.0) > 0.9
    assert gaps.longer(600_000.0) < 0.01


def mix(runs: float, **changes: float) -> Mix:
    values = {
        "prefill_ms": 100.0,
        "recompute_ms": 5000.0,
        "output_tokens": 100.0,
        "context_tokens": 10_000.0,
        "gap_ms": 5000.0,
    }
    return Mix(active=runs, held=runs, **(values | changes))


def test_one_run_has_no_stretch_and_many_share_the_engine() -> None:
    engine = Engine(slots=64, host_tokens=0.0, decode_ms=lambda sequences, _: 10.0 + sequences)
    assert pace(mix(1), engine).stretch == pytest.approx(1.0)
    stretches = [pace(mix(runs), engine).stretch for runs in (2, 8, 16, 32, 64)]
    assert stretches == sorted(stretches)
    # A closed loop cannot be faster than its prefills one after another.
    busy = mix(200, output_tokens=0.0, prefill_ms=1000.0, recompute_ms=0.0)
    assert pace(busy, engine).turn_ms == pytest.approx(200 * 1000 - 5000, rel=0.1)


def test_contexts_that_do_not_fit_are_computed_again() -> None:
    engine = Engine(slots=8, host_tokens=20_000.0, decode_ms=lambda sequences, _: 10.0 + sequences)
    assert lost_share(mix(8), engine) == 0
    assert lost_share(mix(10), engine) == 0
    assert lost_share(mix(20), engine) == pytest.approx(0.5)
    assert pace(mix(20), engine).stretch > 3 * pace(mix(10), engine).stretch


# --- over any life ----------------------------------------------------------------------------------------------------


def happen(engine: FakeEngine, what: str, which: int, number: int, name: str) -> None:
    """One event of a life: a new run, a branch or next turn of the run `name`, its end, an abort, time, or a step."""
    if what == "n":
        engine.arrive(tokens(50 + 40 * which, 1000 * (number + 1)), run=f"r{number}", length=1 + which)
    elif what == "b" and name:
        engine.arrive(tokens(30, 7), run=f"b{number}", parent=name)
    elif what == "c" and name:
        engine.arrive([*engine.histories[name], number][:1000], run=name)
    elif what == "e" and engine.jobs:
        engine.end(sorted(engine.jobs)[which % len(engine.jobs)], EndReason.ABORTED)
    elif what == "f" and name:
        engine.apply_actions(engine.core.handle(RunFinished(at_ms=engine.now_ms, key=RunKey("", name))))
    elif what == "t":
        engine.now_ms += 10.0 ** (which - 1)
    else:
        engine.step()


def everybody_ends(engine: FakeEngine) -> None:
    """Serve what is in flight; runs that are done say so, which lets in those that wait."""
    for step in range(10_000):
        if not engine.jobs:
            return
        if step % 40 == 0:
            for name in sorted(engine.histories):
                engine.apply_actions(engine.core.handle(RunFinished(at_ms=engine.now_ms, key=RunKey("", name))))
        engine.step()
    raise AssertionError(f"turns {sorted(engine.jobs)} starve")


@given(
    mode=st.sampled_from(Admission),
    steps=st.lists(st.tuples(st.sampled_from("nbcefst"), st.integers(0, 7)), max_size=60),
    wait=st.sampled_from([0.0, 5_000.0, 1e9]),
    line=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_an_admitted_run_is_never_refused_the_line_is_bounded_and_everybody_ends(
    mode: Admission, steps: list[tuple[str, int]], wait: float, line: int
) -> None:
    engine = make_engine(
        admission=mode, admission_cap=2, slots=2, host_bytes=2000 * PER_TOKEN, max_wait_ms=wait, max_waiting_runs=line
    )
    served: set[str] = set()
    for number, (what, which) in enumerate(steps):
        names = sorted(engine.histories)
        name = names[which % len(names)] if names else ""
        before = len(engine.refused)
        happen(engine, what, which, number, name)
        served |= {record.run.run for record in engine.records if record.placed_ms is not None}
        assert what not in "bc" or name not in served or len(engine.refused) == before, (
            "an admitted run is never refused"
        )
        waiting = engine.core.state.admission.waiting.values()
        for service in ServiceClass:
            assert sum(account.root and account.service is service for account in waiting) <= line
    everybody_ends(engine)
    assert all(refusal.retry_after_s for refusal in engine.refused), "who is refused is told when to come back"


# --- pauses ----------------------------------------------------------------------------------------------------------


def step_or_wait(engine: FakeEngine) -> None:
    """One step; where there is nothing to do, half a second passes."""
    plan = engine.step()
    engine.now_ms += 0.0 if plan.calls else 500.0


def reuse_of(mode: Admission) -> float:
    """Four contexts on three slots, one turn after another: the share of reusable tokens that were cached."""
    engine = make_engine(slots=3, host_bytes=0, admission=mode, max_wait_ms=1e9)
    begin(engine, "run")
    engine.run_all()
    names = ["run", *(f"sub-{number}" for number in range(3))]
    for number, name in enumerate(names[1:], 1):
        engine.arrive(tokens(600, 50_000 * number), run=name, parent="run", length=4)
        while engine.jobs:
            step_or_wait(engine)
    before = len(engine.records)
    for _ in range(60):
        for name in names:
            if not any(job.run == name for job in engine.jobs.values()):
                engine.arrive([*engine.histories[name], 3, 1], run=name, length=4)
            for _ in range(6):
                step_or_wait(engine)
    records = engine.records[before:]
    return sum(r.cached_tokens for r in records) / sum(r.reusable_tokens for r in records)


def test_one_context_too_many_is_paused_instead_of_displacing_everybody_in_a_circle() -> None:
    assert 1 - reuse_of(Admission.PREDICTED) < (1 - reuse_of(Admission.OFF)) / 3


def test_a_paused_run_is_resumed_after_a_bounded_multiple_of_what_it_costs() -> None:
    engine = make_engine(slots=1, host_bytes=0, admission=Admission.PREDICTED)
    begin(engine, "one")
    engine.run_all()
    paused = engine.arrive(tokens(600, 50_000), run="sub", parent="one", length=2)
    began = engine.now_ms
    while paused in engine.jobs:
        if not any(job.run == "one" for job in engine.jobs.values()):
            engine.arrive([*engine.histories["one"], 5], run="one", length=2)
        step_or_wait(engine)
        engine.now_ms += 50.0
    assert 1000 < engine.now_ms - began < PAUSE_MOST_MS
