"""Who goes first: short steps, their guaranteed opposite, and the trivial rival."""

from tests.core.fake_engine import FakeEngine
from tests.core.helpers import make_engine, make_settings, prompt, tokens
from trunkline.core import actions as act
from trunkline.core.facts import StepDone, TurnArrived
from trunkline.core.policy import Core
from trunkline.core.schedule import DEFER_BUDGETS, HOLD_STEPS
from trunkline.core.types import Order


def calls_until(engine: FakeEngine, turn: int) -> list[act.Call]:
    """Every call from now until `turn` has ended."""
    calls: list[act.Call] = []
    while turn in engine.jobs:
        calls += engine.step().calls
    return calls


def slices_of(calls: list[act.Call], turn: int) -> int:
    return sum(isinstance(call, act.Prefill) and call.turn == turn for call in calls)


def warm_loop(engine: FakeEngine, run: str = "loop") -> list[int]:
    """A run with short steps behind it; returns its history."""
    engine.serve(tokens(50), run=run, length=4)
    for _ in range(3):
        engine.serve([*engine.histories[run], 1, 2], run=run, length=4)
    return engine.histories[run]


def test_a_short_step_has_the_engine_to_itself_beside_a_long_prefill() -> None:
    engine = make_engine()
    history = warm_loop(engine)
    long = engine.arrive(tokens(3000, 5000), run="long")
    engine.step()
    short = engine.arrive([*history, 3], run="loop", length=16)
    assert slices_of(calls_until(engine, short), long) == 0


def test_a_stream_of_short_steps_leaves_a_long_prefill_its_share() -> None:
    engine = make_engine()
    warm_loop(engine)
    long = engine.arrive(tokens(3500, 5000), run="long")
    begun_ms, prefill_ms = engine.now_ms, 0.0
    for _ in range(30):
        step = engine.arrive([*engine.histories["loop"][:200], 3], run="loop", length=16)
        while step in engine.jobs:
            before_ms, plan = engine.now_ms, engine.step()
            if slices_of(list(plan.calls), long):
                prefill_ms += engine.now_ms - before_ms
    assert long in engine.jobs, "the prefill lasts longer than the steps"
    withheld_ms = DEFER_BUDGETS * engine.settings.step_budget_ms
    assert prefill_ms + withheld_ms >= engine.settings.prefill_share * (engine.now_ms - begun_ms)


def test_a_slice_never_exceeds_the_step_budget_while_a_short_step_is_due() -> None:
    engine = make_engine(step_budget_ms=50.0, max_slice_tokens=4096)
    warm_loop(engine)
    engine.arrive(tokens(3000, 5000))
    while engine.jobs:
        plan = engine.step()
        if any(isinstance(call, act.Prefill) for call in plan.calls):
            assert plan.predicted_ms <= 50.0 or all(
                c.end - c.start <= engine.settings.min_slice_tokens for c in plan.calls if isinstance(c, act.Prefill)
            )


def test_slices_grow_where_nobody_is_due() -> None:
    engine = make_engine()
    engine.arrive(tokens(3000))
    plan = engine.step()
    assert [c.end - c.start for c in plan.calls if isinstance(c, act.Prefill)] == [256]


def test_branches_that_come_at_once_get_their_first_tokens_before_any_decodes_on() -> None:
    engine = make_engine(slots=8)
    engine.serve(tokens(1500), run="parent", length=1)
    turns = [engine.arrive([*tokens(1500), *range(100 * b, 100 * b + 10)], length=8) for b in range(8)]
    calls: list[act.Call] = []
    while any(engine.core.state.turns[turn].generated == 0 for turn in turns):
        calls += engine.step().calls
    assert sum(isinstance(call, act.Decode) for call in calls) <= 2


def test_decodes_are_not_held_back_for_ever() -> None:
    engine = make_engine(slots=4)
    engine.serve(tokens(50), run="talk", length=1)
    talking = engine.arrive([*tokens(50), 1], run="talk", length=30)
    engine.step()
    for stranger in range(40):
        engine.arrive(tokens(100, 1000 + 100 * stranger), length=1)
    held = longest = 0
    while talking in engine.jobs:
        calls = engine.step().calls
        decodes = any(isinstance(c, act.Decode) and any(turn == talking for turn, _ in c.turns) for c in calls)
        held = 0 if decodes else held + 1
        longest = max(longest, held)
    assert 0 < longest <= HOLD_STEPS


def test_a_stream_of_quick_prompts_leaves_a_long_prefill_its_share() -> None:
    engine = make_engine(slots=4)
    long = engine.arrive(tokens(3500, 5000), run="long")
    engine.step()
    begun_ms, prefill_ms, stranger = engine.now_ms, 0.0, 0
    while engine.now_ms < begun_ms + 10_000 and long in engine.jobs:
        while len(engine.jobs) < 4:
            stranger += 1
            engine.arrive(tokens(60, 10_000 + 100 * stranger), length=4)
        before_ms, plan = engine.now_ms, engine.step()
        spent = [c for c in plan.calls if isinstance(c, act.Prefill) and c.turn == long]
        prefill_ms += (engine.now_ms - before_ms) * bool(spent)
    withheld_ms = 2 * DEFER_BUDGETS * engine.settings.step_budget_ms
    assert prefill_ms + withheld_ms >= engine.settings.prefill_share * (engine.now_ms - begun_ms)


def test_a_long_prompt_gets_a_slot_among_short_steps_in_the_end() -> None:
    engine = make_engine(slots=2)
    histories = [tokens(50, 10_000 * (run + 1)) for run in range(6)]
    for run, history in enumerate(histories):
        engine.serve(history, run=f"r{run}", length=20)
        engine.serve([*engine.histories[f"r{run}"], 1], run=f"r{run}", length=20)
    long = engine.arrive(tokens(2000, 5000), run="long", length=1)
    begun_ms = engine.now_ms
    while long in engine.jobs and engine.now_ms < begun_ms + 300_000:
        open_runs = {job.run for job in engine.jobs.values()}
        for run in range(6):
            if f"r{run}" not in open_runs:
                engine.arrive([*engine.histories[f"r{run}"][:60], 1], run=f"r{run}", length=20)
        engine.step()
    assert long not in engine.jobs


def test_a_short_step_is_not_behind_a_new_long_prompt_in_the_queue() -> None:
    engine = make_engine(slots=1)
    history = warm_loop(engine)
    engine.arrive(tokens(500, 2000), run="first")
    engine.step()
    waiting = engine.arrive(tokens(500, 5000), run="second")
    engine.now_ms += 100
    short = engine.arrive([*history, 3], run="loop")
    while short in engine.jobs:
        engine.step()
        assert engine.core.state.turns.get(waiting) is None or engine.core.state.turns[waiting].slot is None


def test_a_slot_is_kept_free_for_a_short_step_that_is_due() -> None:
    engine = make_engine(slots=2)
    warm_loop(engine)
    engine.arrive(tokens(1000, 2000))
    second = engine.arrive(tokens(1000, 5000))
    engine.step()
    assert engine.core.state.turns[second].slot is None


def test_a_slot_is_not_kept_free_for_ever() -> None:
    engine = make_engine(slots=2)
    warm_loop(engine)
    engine.arrive(tokens(1000, 2000))
    second = engine.arrive(tokens(1000, 5000))
    engine.now_ms += 60_000
    engine.step()
    assert engine.core.state.turns[second].slot is not None


def test_branches_that_are_nearly_computed_decode_together() -> None:
    engine = make_engine(slots=8)
    warm_loop(engine)
    history = engine.histories["loop"]
    turns = [engine.arrive([*history, 100 + branch], length=8) for branch in range(8)]
    for _ in range(8):
        engine.step()
    together = max(len(c.turns) for plan in engine.plans for c in plan.calls if isinstance(c, act.Decode))
    assert together == len(turns)


def test_first_come_first_served_makes_the_short_step_wait() -> None:
    engine = make_engine(order=Order.FCFS, max_slice_tokens=512)
    history = warm_loop(engine)
    long = engine.arrive(tokens(3000, 5000), run="long")
    engine.step()
    short = engine.arrive([*history, 3], run="loop", length=4)
    assert slices_of(calls_until(engine, short), long) == 5


def test_a_decode_names_its_slots_in_ascending_order() -> None:
    engine = make_engine()
    for turn in range(4):
        engine.arrive(tokens(20, 100 * turn), length=8)
    engine.run_all()
    for plan in engine.plans:
        for call in plan.calls:
            if isinstance(call, act.Decode):
                slots = [slot for _, slot in call.turns]
                assert slots == sorted(slots)


def test_a_plan_that_only_decodes_says_how_long_it_holds() -> None:
    engine = make_engine()
    engine.arrive(tokens(20), length=12)
    assert engine.step().repeat == 1  # the prompt
    assert engine.step().repeat == 11
    engine.arrive(tokens(20, 500), length=5)
    assert engine.step().repeat == 1
    assert engine.step().repeat == 4


def test_steps_reported_together_leave_the_core_as_steps_reported_one_by_one() -> None:
    def after(repeats: list[int]) -> tuple[object, ...]:
        core = Core(make_settings())
        arrived = TurnArrived(at_ms=0, turn=1, salt="", prompt=prompt(*tokens(20)), max_new_tokens=12, fresh="f")
        core.handle(arrived)
        core.handle(StepDone(at_ms=1, plan=core.plan(1).seq, moves=(), calls_ms=(9.0,)))
        for count in repeats:
            done = StepDone(at_ms=2, plan=core.plan(2).seq, moves=(), calls_ms=(10.0 * count,), repeats=count)
            core.handle(done)
        turn = core.state.turns[1]
        return turn.generated, core.state.slots[0].held, round(core.state.costs.decode_ms(1, 25), 1)

    assert after([1] * 9) == after([4, 5]) == after([9])


def test_forced_tokens_are_fed_in_one_pass() -> None:
    engine = make_engine()
    engine.arrive(tokens(20), length=12, forced=[6, 0, 2])
    engine.run_all()
    calls = [call for plan in engine.plans for call in plan.calls]
    assert calls[1:] == [
        act.Extend(1, 0, 0, 7, last=True),  # the first token and the six forced behind it
        act.Decode(((1, 0),)),
        act.Extend(1, 0, 8, 11, last=True),
    ]
    record = engine.records[-1]
    assert (record.completion_tokens, record.passes) == (12, 4)


def test_a_span_that_ends_the_turn_needs_no_pass() -> None:
    engine = make_engine()
    record = engine.serve(tokens(20), length=5, forced=[4])
    assert (record.completion_tokens, record.passes) == (5, 1)
    again = engine.serve(engine.histories[record.run.run] + [9], run=record.run.run)
    assert again.cached_tokens == 20  # what was never fed cannot be a hit


def test_forced_tokens_beside_decodes_keep_to_the_step_budget() -> None:
    engine = make_engine()
    engine.arrive(tokens(8), length=400, forced=[300])
    engine.arrive(tokens(8, 500), length=60)
    engine.run_all()
    budget, spans = engine.settings.step_budget_ms, 0
    for plan in engine.plans:
        extends = [call for call in plan.calls if isinstance(call, act.Extend)]
        spans += len(extends)
        if extends and any(isinstance(call, act.Decode) for call in plan.calls):
            assert plan.predicted_ms <= 1.5 * budget
    assert spans > 1


def test_a_long_span_alone_is_cut_at_the_largest_slice_only() -> None:
    engine = make_engine(max_slice_tokens=64)
    engine.arrive(tokens(8), length=120, forced=[100])
    engine.run_all()
    extends = [call for plan in engine.plans for call in plan.calls if isinstance(call, act.Extend)]
    assert [(call.start, call.end, call.last) for call in extends] == [(0, 64, False), (64, 101, True)]
