"""Costs fitted to a decision log are the costs that made it."""

from pathlib import Path

import pytest

from tests.sim.helpers import COSTS, PER_TOKEN, loop, make_settings
from trunkline import cli
from trunkline.sim.agents import Workload
from trunkline.sim.calibrate import CalibrationError, calibrate, fit
from trunkline.sim.costs import MeasuredCosts, Noise
from trunkline.sim.nodes import read_node
from trunkline.sim.simulation import Simulation
from trunkline.wire.journal import Journal, JournalError

TRUTH = MeasuredCosts(prefill=(5.0, 1.0, 0.002), decode=(6.0, 2.0, 0.01), move=(0.1, 1e-6), step_ms=0.7)


def write_log(log: Path, costs: MeasuredCosts, spread: float = 0.0, *, skip_ahead: bool = False) -> None:
    settings = make_settings(host_bytes=900 * PER_TOKEN)
    journal = Journal(log, settings)
    sessions = [(loop(f"s{n}", 5, first=60 + 40 * n, more=30, out=10, gap_ms=100.0),) for n in range(8)]
    sim = Simulation(
        sessions, Workload(load=4), settings, costs, noise=Noise(1, spread), journal=journal, skip_ahead=skip_ahead
    )
    sim.run()
    journal.close()


@pytest.mark.parametrize("skip_ahead", [False, True])
def test_costs_are_found_again_in_the_log_that_they_made(tmp_path: Path, skip_ahead: bool) -> None:
    write_log(tmp_path / "log", TRUTH, skip_ahead=skip_ahead)
    node = calibrate(tmp_path / "log", turn_ms=2.0)
    assert node.settings == make_settings(host_bytes=900 * PER_TOKEN)
    assert node.costs.prefill == pytest.approx(TRUTH.prefill, rel=0.01)
    assert node.costs.decode == pytest.approx(TRUTH.decode, rel=0.01)
    assert node.costs.move == pytest.approx(TRUTH.move, rel=0.01)
    assert node.costs.step_ms == pytest.approx(0.7)
    assert node.costs.turn_ms == 2.0


def test_noise_is_measured_and_does_not_move_the_sum(tmp_path: Path) -> None:
    write_log(tmp_path / "log", TRUTH, spread=0.2)
    costs = calibrate(tmp_path / "log").costs
    assert costs.spread == pytest.approx(0.2, abs=0.05)
    assert costs.decode_ms(2, 400) == pytest.approx(TRUTH.decode_ms(2, 400), rel=0.1)
    assert costs.prefill_ms(100, 200) == pytest.approx(TRUTH.prefill_ms(100, 200), rel=0.1)


def test_no_coefficient_is_negative_and_stalls_do_not_tilt_the_rest() -> None:
    calls = [(1.0, float(n)) for n in range(1, 60)]
    falling = [100.0 - n for n in range(1, 60)]
    assert min(fit(calls, falling)) >= 0
    stalled = [5.0 + 2.0 * n for n in range(1, 60)]
    stalled[50] += 500.0
    constant, slope = fit(calls, stalled)
    assert slope / constant == pytest.approx(2.0 / 5.0, rel=0.01)


def test_a_log_that_says_too_little_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(JournalError, match="empty"):
        calibrate(tmp_path / "empty")
    (tmp_path / "other").write_text('{"some": 1}\n')
    with pytest.raises(JournalError, match="other:1: not an entry"):
        calibrate(tmp_path / "other")
    settings = make_settings()
    Journal(tmp_path / "idle", settings).close()
    with pytest.raises(CalibrationError, match="0 prefills are too few"):
        calibrate(tmp_path / "idle")


def test_the_command_writes_a_node_that_sim_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "log", COSTS)
    assert cli.main(["calibrate", "--decision-log", str(tmp_path / "log"), "--json", str(tmp_path / "node")]) == 0
    assert "prefill slice" in capsys.readouterr().out
    assert read_node(tmp_path / "node").settings.slots == 2
    assert cli.main(["calibrate", "--decision-log", str(tmp_path / "no"), "--json", str(tmp_path / "n")]) == 1
