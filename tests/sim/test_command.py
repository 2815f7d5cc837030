"""`trunkline sim` from a trace file to figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sim.helpers import COSTS, loop, make_settings
from trunkline import cli
from trunkline.sim.nodes import NodeFile, write_node
from trunkline.sim.report import ticks
from trunkline.wire.journal import replay
from trunkline.wire.traces import BlocksPrompt, RunTrace, TurnTrace, write_runs


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six sessions of blocks, five turns each."""

    def turns() -> tuple[TurnTrace, ...]:
        first = TurnTrace(prompt=BlocksPrompt(add=((0, 200),), tail_tokens=10), output_tokens=90)
        more = [
            TurnTrace(prompt=BlocksPrompt(keep=k, add=((k, 8),), tail_tokens=5), output_tokens=50, gap_ms=2000.0)
            for k in range(200, 232, 8)
        ]
        return (first, *more)

    path = tmp_path / "trace.jsonl"
    write_runs(path, [RunTrace(id=f"s{n}", turns=turns(), block_tokens=64) for n in range(6)])
    return path


def sim(*arguments: object) -> int:
    return cli.main(["sim", *map(str, arguments)])


def test_a_sweep_of_loads_reports_the_figures_of_each(trace: Path, tmp_path: Path) -> None:
    assert sim("--trace", trace, "--load", "1,2,6", "--json", tmp_path / "out.json", "--price", 98.32) == 0
    report: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert [result["load"] for result in report["results"]] == [1, 2, 6]
    walls = [result["figures"]["wall_s"] for result in report["results"]]
    assert walls == sorted(walls, reverse=True)
    for result in report["results"]:
        figures = result["figures"]
        assert figures["completed_runs"] == 6
        assert figures["turns"] == 30
        assert figures["broken_promises"] == 0
        assert figures["reuse"] > 0.99
        assert figures["cost_per_run_usd"] == pytest.approx(98.32 * figures["wall_s"] / 3600 / 6)
        assert result["timeline"]


def test_one_seed_gives_one_report(trace: Path, tmp_path: Path) -> None:
    def report(name: str, seed: int) -> dict[str, Any]:
        options = ("--noise", 0.3, "--seed", seed, "--json", tmp_path / name)
        assert sim("--trace", trace, "--load", "4", *options) == 0
        found: dict[str, Any] = json.loads((tmp_path / name).read_text())
        del found["results"][0]["simulated_in_s"], found["seed"]
        return found

    assert report("a", 1) == report("b", 1)
    assert report("a", 1) != report("c", 2)


def test_the_decision_log_replays(trace: Path, tmp_path: Path) -> None:
    assert sim("--trace", trace, "--decision-log", tmp_path / "log") == 0
    plans = list(replay(tmp_path / "log"))
    assert plans
    assert all(logged == again for logged, again in plans)


def test_sharing_off_collapses_reuse(trace: Path, tmp_path: Path) -> None:
    assert sim("--trace", trace, "--sharing", "off", "--json", tmp_path / "out.json") == 0
    assert json.loads((tmp_path / "out.json").read_text())["results"][0]["figures"]["reuse"] == 0


def test_a_measured_node_brings_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_node(tmp_path / "node", NodeFile(settings=make_settings(), costs=COSTS))
    write_runs(tmp_path / "trace", [loop(f"s{n}", 2) for n in range(3)])
    assert sim("--trace", tmp_path / "trace", "--node", tmp_path / "node") == 0
    assert "2 slots of 1,024 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nothing-here"], "neither a model known here"),
        (["--model", "llama-3.1-8b", "--hardware", "4090", "--devices", "1", "--ctx", "1000000"], "add --devices"),
        (["--load", "1,2", "--decision-log", "log"], "takes one --load"),
        (["--node", "nothing-here"], "cannot be read"),
        (["--scale", "7"], "cannot divide"),
    ],
)
def test_what_cannot_be_simulated_is_said(
    trace: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim("--trace", trace, *arguments) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("load", ["0", "1,x", "", "-1"])
def test_a_load_that_is_no_load_is_refused(trace: Path, load: str) -> None:
    with pytest.raises(SystemExit):
        sim("--trace", trace, f"--load={load}")


def test_the_report_is_one_page_with_every_curve_and_nothing_to_fetch(trace: Path, tmp_path: Path) -> None:
    assert sim("--trace", trace, "--load", "1,4", "--report", tmp_path / "out.html") == 0
    page = (tmp_path / "out.html").read_text()
    for title in ("Run completion", "Reuse", "p95 step latency", "Goodput", "Stretch", "Queued turns", "KV in slots"):
        assert f'aria-label="{title}"' in page
    assert page.count("<svg") == page.count("</svg>") == 10
    assert "http" not in page
    assert "NaN" not in page
    assert "load 4" in page


@pytest.mark.parametrize("most", [0.0, 1e-9, 0.97, 1.0, 3.0, 19.0, 21.0, 123456.0])
def test_axes_end_at_round_numbers_above_what_they_show(most: float) -> None:
    marks = ticks(most)
    assert marks[0] == 0
    assert marks[-1] >= most
    assert 2 <= len(marks) <= 7
