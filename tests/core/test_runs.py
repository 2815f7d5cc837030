"""Whose turn a prompt is, when nothing names it."""

from tests.core.helpers import make_engine, tokens
from trunkline.core.facts import RunDeclared, RunFinished, RunRestored
from trunkline.core.runs import RunTable
from trunkline.core.types import RunKey, RunState


def test_a_prompt_that_extends_a_run_continues_it() -> None:
    engine = make_engine()
    first = engine.serve(tokens(50)).run
    record = engine.serve([*engine.histories[first.run], 1, 2])
    assert (record.run, record.index) == (first, 1)


def test_a_prompt_that_keeps_the_last_prompt_but_not_the_answer_continues_the_run() -> None:
    engine = make_engine()
    first = engine.serve(tokens(50)).run
    assert engine.serve([*tokens(50), 7, 7, 7]).run == first


def test_a_prompt_that_leaves_an_earlier_turn_is_a_branch() -> None:
    engine = make_engine()
    first = engine.serve(tokens(50)).run
    fork = [*engine.histories[first.run], 1]
    engine.serve([*engine.histories[first.run], 2, 3])
    engine.serve([*engine.histories[first.run], 4])
    branch = engine.serve(fork).run
    assert branch != first
    assert engine.core.state.runs.get(branch).parent == first.run  # type: ignore[union-attr]


def test_a_prompt_that_arrives_during_the_runs_turn_is_a_branch() -> None:
    engine = make_engine()
    engine.arrive(tokens(50), length=8)
    engine.arrive([*tokens(50), 1])
    engine.run_all()
    parents = {run.key.run: run.parent for run in engine.core.state.runs}
    assert parents == {"fresh-1": None, "fresh-2": "fresh-1"}


def test_first_turns_with_a_shared_system_prompt_are_different_runs() -> None:
    engine = make_engine()
    engine.serve([*tokens(50), 1])
    engine.serve([*tokens(50), 2])
    assert [run.parent for run in engine.core.state.runs] == [None, None]


def test_a_name_wins_over_what_the_prompt_suggests() -> None:
    engine = make_engine()
    engine.serve(tokens(50), run="a")
    assert engine.serve([*engine.histories["a"], 1], run="b").run == RunKey("", "b")


def test_names_are_scoped_by_key() -> None:
    engine = make_engine()
    engine.serve(tokens(50), run="a", salt="k")
    record = engine.serve(tokens(50), run="a", salt="l")
    assert record.index == 0
    assert len(engine.core.state.runs) == 2


def test_a_finished_run_that_gets_a_turn_is_open_again() -> None:
    engine = make_engine()
    engine.serve(tokens(50), run="a")
    run = engine.core.state.runs.get(RunKey("", "a"))
    assert run is not None
    engine.core.handle(RunFinished(at_ms=engine.now_ms, key=run.key))
    states = [run.state]
    engine.arrive([*engine.histories["a"], 1], run="a")
    states.append(run.state)
    engine.run_all()
    states.append(run.state)
    assert states == [RunState.FINISHED, RunState.ACTIVE, RunState.WAITING]


def test_a_final_turn_finishes_the_run() -> None:
    engine = make_engine()
    engine.serve(tokens(50), run="a", final=True)
    run = engine.core.state.runs.get(RunKey("", "a"))
    assert run is not None
    assert run.state is RunState.FINISHED


def test_a_run_that_waited_for_hours_is_presumed_over_until_it_returns() -> None:
    engine = make_engine()
    engine.serve(tokens(50), run="a")
    engine.now_ms += 3 * 3_600_000
    engine.serve(tokens(50, 1000), run="b")
    run = engine.core.state.runs.get(RunKey("", "a"))
    assert run is not None
    assert run.state is RunState.FINISHED
    record = engine.serve([*engine.histories["a"], 1], run="a")
    assert (record.index, record.cached_tokens) == (1, 53)
    assert run.state is RunState.WAITING  # type: ignore[comparison-overlap]


def test_runs_that_nobody_ever_finishes_do_not_fill_memory() -> None:
    engine = make_engine(slots=1, host_bytes=0, max_tree_symbols=1000)
    for run in range(60):
        engine.serve(tokens(100, 200 * run), run=f"r{run}", length=1)
    assert engine.core.state.tree.symbols <= 1000


def test_the_oldest_runs_are_forgotten_past_a_limit() -> None:
    engine = make_engine()
    engine.core.state.runs = RunTable(keep=10)
    for run in range(30):
        engine.serve(tokens(10, 50 * run), run=f"r{run}", length=1)
    assert [run.key.run for run in engine.core.state.runs] == [f"r{run}" for run in range(20, 30)]


def test_declared_and_restored_runs_are_presumed_over_like_others() -> None:
    engine = make_engine()
    engine.core.handle(RunRestored(at_ms=0.0, key=RunKey("", "old"), parent=None, turns=3, prompt_tokens=80))
    engine.core.handle(RunDeclared(at_ms=0.0, key=RunKey("", "declared")))
    engine.serve(tokens(50), run="a")
    engine.now_ms += 3 * 3_600_000
    engine.serve(tokens(50, 1000), run="b")
    waiting = [run.key.run for run in engine.core.state.runs if run.state is RunState.WAITING]
    assert waiting == ["b"]


def test_a_sub_agent_that_names_only_its_parent_stays_one_run() -> None:
    engine = make_engine()
    engine.serve(tokens(50), run="a")
    first = engine.serve([*engine.histories["a"], 1], parent="a").run
    second = engine.serve([*engine.histories[first.run], 2], parent="a")
    assert (second.run, second.index) == (first, 1)


def test_a_run_that_has_begun_is_never_refused_for_load_named_or_not() -> None:
    engine = make_engine(slots=1, max_queue=1)
    first = engine.serve(tokens(50)).run
    engine.arrive(tokens(50, 1000), length=8)
    engine.step()
    engine.arrive(tokens(50, 2000))
    engine.arrive([*engine.histories[first.run], 1])
    assert engine.refused == []
    engine.arrive(tokens(50, 3000))
    engine.arrive(tokens(50, 4000), parent="invented")
    assert len(engine.refused) == 2


def test_no_tool_gap_is_counted_while_another_turn_of_the_run_is_in_flight() -> None:
    engine = make_engine()
    engine.serve(tokens(50), run="a")
    engine.arrive([*tokens(50), 1], run="a", length=8)
    engine.now_ms += 5000
    engine.arrive([*tokens(50), 2], run="a")
    engine.run_all()
    assert [record.tool_gap_ms for record in engine.records if record.index == 2] == [None]
