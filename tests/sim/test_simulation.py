"""Agents on a simulated node: what it costs, who waits for whom, and that the decisions are the core's."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sim.helpers import COSTS, PER_TOKEN, loop, make_settings, run, simulate, turn
from trunkline.core import lifecycle
from trunkline.core.placement import Placement
from trunkline.core.policy import Core
from trunkline.core.predict import CostModel, Forecast
from trunkline.core.prefix import PrefixTree
from trunkline.core.retention import Retention
from trunkline.core.runs import RunTable
from trunkline.core.schedule import Scheduler
from trunkline.sim.agents import Answers, Arrival, Workload
from trunkline.sim.costs import Noise
from trunkline.sim.figures import figures
from trunkline.sim.simulation import Simulation
from trunkline.wire.journal import Journal, replay
from trunkline.wire.traces import Fork


def test_a_lone_turn_takes_what_its_calls_cost() -> None:
    sim = simulate([(run("a", turn(0, range(30), out=3)),)])
    (outcome,) = sim.agents.turns
    decodes = COSTS.decode_ms(1, 30) + COSTS.decode_ms(1, 31)
    assert outcome.first_token_ms == COSTS.prefill_ms(30, 0)
    assert outcome.latency_ms == pytest.approx(COSTS.prefill_ms(30, 0) + decodes)
    assert outcome.ideal_ms == pytest.approx(outcome.latency_ms)


def test_a_later_turn_hits_its_runs_prompt_and_answer() -> None:
    sim = simulate([(loop("a", 3, first=40, more=10, out=4),)])
    assert [t.cached_tokens for t in sim.agents.turns] == [0, 43, 57]  # the last token of an answer is not in KV
    assert [t.reusable_tokens for t in sim.agents.turns] == [0, 43, 57]


def test_answers_apart_are_never_hit() -> None:
    sim = simulate([(loop("a", 3, first=40, more=10, out=4),)], Workload(answers=Answers.APART))
    assert [t.cached_tokens for t in sim.agents.turns] == [0, 40, 54]


def test_tool_gaps_are_waited_for_scaled_and_capped() -> None:
    def began(workload: Workload) -> list[float]:
        sim = simulate([(loop("a", 2, gap_ms=1000.0),)], workload)
        first, second = sim.agents.turns
        return [second.submitted_ms - first.ended_ms]

    assert began(Workload()) == [pytest.approx(1000.0)]
    assert began(Workload(gap_scale=0.5)) == [pytest.approx(500.0)]
    assert began(Workload(gap_cap_ms=10.0)) == [pytest.approx(10.0)]


def test_a_parent_waits_for_the_sub_agents_it_joins_and_for_no_others() -> None:
    joined = run("a/joined", turn(40, [1, 2], out=50), fork=Fork("a", after=1, joins=1))
    loose = run("a/loose", turn(40, [3, 4], out=200), fork=Fork("a", after=1))
    sim = simulate([(loop("a", 2), joined, loose)])
    ended = {outcome.run: outcome.ended_ms for outcome in sim.agents.turns}
    began = {(outcome.run, outcome.index): outcome.submitted_ms for outcome in sim.agents.turns}
    assert began["a", 1] == pytest.approx(ended["a/joined"] + 50.0)
    assert began["a", 1] < ended["a/loose"]
    assert began["a/joined", 0] == began["a/loose", 0]


def test_a_sub_agent_that_ends_while_its_parent_generates_starts_no_turn_twice() -> None:
    child = run("a/c", turn(40, [1], out=1), fork=Fork("a", after=1, joins=3))
    sim = simulate([(loop("a", 4, out=30), child)])
    assert [t.index for t in sim.agents.turns if t.run == "a"] == [0, 1, 2, 3]


def test_lanes_keep_that_many_sessions_open() -> None:
    sim = simulate([(loop(f"s{n}", 2),) for n in range(7)], Workload(load=3))
    edges = sorted([(o.began_ms, 1) for o in sim.agents.runs] + [(o.ended_ms or 0.0, -1) for o in sim.agents.runs])
    open_now, most = 0, 0
    for _, change in sorted(edges, key=lambda edge: (edge[0], edge[1])):
        open_now += change
        most = max(most, open_now)
    assert most == 3
    assert len(sim.agents.runs) == 7


def test_a_ramp_spreads_the_first_sessions() -> None:
    sim = simulate([(loop(f"s{n}", 2, gap_ms=9000),) for n in range(4)], Workload(load=4, ramp_ms=4000))
    assert [o.began_ms for o in sim.agents.runs] == [0.0, 1000.0, 2000.0, 3000.0]


def test_poisson_arrivals_follow_their_seed_and_all_arrive_at_once() -> None:
    def began(workload: Workload) -> list[float]:
        return [o.began_ms for o in simulate([(loop(f"s{n}", 1),) for n in range(5)], workload).agents.runs]

    poisson = Workload(arrival=Arrival.POISSON, load=3600.0, seed=1)
    assert began(poisson) == began(poisson)
    assert began(poisson) != began(Workload(arrival=Arrival.POISSON, load=3600.0, seed=2))
    assert began(Workload(arrival=Arrival.ALL)) == [0.0] * 5


def test_skipping_ahead_changes_nothing_but_the_number_of_plans() -> None:
    sessions = [(loop(f"s{n}", 3, first=60 + 90 * n, out=40 + 7 * n, gap_ms=30.0 * n),) for n in range(4)]
    fast, slow = simulate(sessions), simulate(sessions, skip_ahead=False)
    assert fast.node.plans < slow.node.plans / 2
    assert fast.node.steps == slow.node.steps
    for one, other in zip(fast.agents.turns, slow.agents.turns, strict=True):
        assert (one.run, one.index, one.cached_tokens) == (other.run, other.index, other.cached_tokens)
        assert one.ended_ms == pytest.approx(other.ended_ms)


def test_a_prompt_that_fits_no_slot_ends_its_run_with_the_reason() -> None:
    sim = simulate([(run("long", turn(0, range(2000))),), (loop("a", 2),)])
    errors = {o.run: o.error for o in sim.agents.runs}
    assert errors["a"] is None
    assert "do not fit 1024 tokens" in str(errors["long"])


def test_a_new_run_that_is_refused_for_load_tries_again_when_told_to() -> None:
    sessions = [(run(f"s{n}", turn(0, range(n * 500, n * 500 + 400), out=100)),) for n in range(6)]
    sim = simulate(sessions, Workload(load=6), slots=1, max_queue=1)
    counted = figures(
        sim.agents.turns, sim.agents.runs, busy_ms=1, broken_promises=0, stretch_objective=2, usd_per_h=None
    )
    assert counted.completed_runs == 6
    assert counted.refusals > 0
    assert counted.late_refusals == 0


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (PrefixTree, "match"),
        (PrefixTree, "extend"),
        (PrefixTree, "graft"),
        (RunTable, "touch"),
        (Placement, "place"),
        (Scheduler, "step"),
        (Retention, "worth_saving"),
        (CostModel, "saw_decode"),
        (lifecycle, "arrive"),
        (lifecycle, "end"),
        (Forecast, "saw_output"),
        (Core, "plan"),
    ],
)
def test_the_simulator_has_no_copy_of_a_decision(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of the core stops working, the simulator stops."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(name)

    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(ZeroDivisionError, match=name):
        simulate([(loop(f"s{n}", 3),) for n in range(5)], Workload(load=5), slots=1)


def noisy(log: Path, hash_seed: str) -> bytes:
    """The decision log of one simulation in a process of its own."""
    code = (
        "import sys; from pathlib import Path; from tests.sim.test_simulation import write_log;"
        f"write_log(Path({str(log)!r}))"
    )
    paths = [str(Path(__file__).parents[2] / part) for part in ("src", "")]
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(paths)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
    return log.read_bytes()


def write_log(log: Path) -> Simulation:
    """Many runs over few slots, with noise and Poisson arrivals."""
    settings = make_settings(host_bytes=600 * PER_TOKEN)
    journal = Journal(log, settings)
    workload = Workload(arrival=Arrival.POISSON, load=7200.0, seed=3)
    sessions = [(loop(f"s{n}", 4, first=80 + n),) for n in range(12)]
    sim = Simulation(sessions, workload, settings, COSTS, noise=Noise(3, 0.2), journal=journal)
    sim.run()
    journal.close()
    return sim


def test_one_seed_makes_one_decision_log_in_any_process(tmp_path: Path) -> None:
    first = noisy(tmp_path / "one", "1")
    assert first == noisy(tmp_path / "two", "2")
    assert b'"Drop"' in first, "there was something to decide"


def test_a_simulated_decision_log_replays_to_the_same_plans(tmp_path: Path) -> None:
    sim = write_log(tmp_path / "log")
    plans = list(replay(tmp_path / "log"))
    assert len(plans) == sim.node.plans
    assert all(logged == again for logged, again in plans)


def test_figures_say_how_far_a_run_is_from_its_ideal() -> None:
    def stretch(count: int) -> float:
        sim = simulate([(loop(f"s{n}", 3, out=30, gap_ms=0.0),) for n in range(count)], Workload(load=count))
        counted = figures(
            sim.agents.turns, sim.agents.runs, busy_ms=1, broken_promises=0, stretch_objective=2, usd_per_h=None
        )
        assert counted.stretch is not None
        return counted.stretch.mean

    assert stretch(1) == pytest.approx(1.0, abs=0.01)
    assert stretch(8) > 2
