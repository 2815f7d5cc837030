"""Parity: agent runs on the real embedded engine, and their simulation on a node calibrated from the same machine.

    python benchmarks/parity.py [--repeats 5] [--loads 1,2,4] [--json OUT]

A server is calibrated from its decision log while it serves other sessions. Then, for each load, the same sessions
are played on fresh servers `--repeats` times and simulated once without noise. Sessions are token ids with recorded
answers, sent as `trunkline bench` sends them. A simulated figure should lie within the larger of 10 % and the spread of
the real runs.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import servers
from measure import machine, play, say, write_json
from trunkline.bench.events import Event, TurnEvent
from trunkline.bench.report import Summary
from trunkline.core.facts import TurnArrived, TurnEnded
from trunkline.sim.agents import Answers, Workload
from trunkline.sim.calibrate import calibrate, show
from trunkline.sim.figures import Figures, figures
from trunkline.sim.nodes import NodeFile
from trunkline.sim.simulation import Simulation
from trunkline.wire.journal import read
from trunkline.wire.traces import RunTrace, Session, TokensPrompt, TurnTrace

SLOTS, CTX, HOST_MIB = 2, 2048, 64
HEADER = "X-Trunkline-Run"


def sessions(seed: int, count: int, turns: int) -> list[Session]:
    """Agents with a task of about 300 tokens, tool results of about 60, answers of 8 to 40, gaps of about 0.2 s."""
    rng = random.Random(f"parity {seed}")
    return [(_run(rng, f"parity-{seed}-{n}", turns),) for n in range(count)]


def _run(rng: random.Random, name: str, turns: int) -> RunTrace:
    made: list[TurnTrace] = []
    length = 0
    for index in range(turns):
        new = rng.randint(200, 400) if index == 0 else rng.randint(30, 90)
        out = rng.choice((8, 12, 16, 40))
        if made:
            new += made[-1].output_tokens or 0
        add = tuple(rng.randint(1000, 40_000) for _ in range(new))
        gap_ms = rng.uniform(100, 300) if made else None
        made.append(TurnTrace(prompt=TokensPrompt(keep=length, add=add), output_tokens=out, gap_ms=gap_ms))
        length += new
    return RunTrace(id=name, turns=tuple(made))


def real(args: argparse.Namespace, played: Sequence[Session], lanes: int, log: Path) -> tuple[Summary, list[Event]]:
    """The sessions on a fresh server, which writes its decisions to `log`."""
    flags = [*args.serve_flags.split(), "--decision-log", str(log)]
    size: dict[str, int] = {"slots": SLOTS, "ctx": CTX, "host_mib": HOST_MIB}
    with servers.trunkline_server(servers.find_model(args), **size, flags=flags) as url:
        return play(url, played, lanes=lanes, session_header=HEADER)


def outside_ms(log: Path, events: Sequence[Event]) -> float:
    """What a turn took its client beyond the engine, on average: HTTP, parsing, the event loop.

    Only where one agent plays alone: beside others a turn also waits for the step in progress, which is simulated.
    """
    arrived: dict[int, float] = {}
    inside: list[float] = []
    for entry in read(log):
        if isinstance(entry, TurnArrived):
            arrived[entry.turn] = entry.at_ms
        elif isinstance(entry, TurnEnded):
            inside.append(entry.at_ms - arrived[entry.turn])
    seen = [event.latency_ms for event in events if isinstance(event, TurnEvent)]
    assert len(seen) == len(inside)
    return max(0.0, float(np.mean(seen) - np.mean(inside)))


def simulated(node: NodeFile, played: Sequence[Session], lanes: int) -> Figures:
    """The same sessions on the calibrated node."""
    workload = Workload(load=lanes, gap_cap_ms=2000.0, answers=Answers.APART)
    sim = Simulation(played, workload, node.settings, node.costs)
    sim.run()
    return figures(
        sim.agents.turns,
        sim.agents.runs,
        busy_ms=sim.node.busy_ms,
        broken_promises=sim.node.total_broken_promises,
        stretch_objective=2.0,
        usd_per_h=None,
    )


def three(found: Summary | Figures) -> dict[str, float]:
    """The figures that are compared."""
    assert found.completion_s is not None
    assert found.latency_ms is not None
    assert found.reuse is not None
    return {"completion_s": found.completion_s.mean, "reuse": found.reuse, "p95_step_ms": found.latency_ms.p95}


def compare(measured: Sequence[dict[str, float]], modelled: dict[str, float], lanes: int) -> dict[str, Any]:
    """One load's rows."""
    rows: dict[str, Any] = {}
    for name, value in modelled.items():
        real_values = [run[name] for run in measured]
        middle = float(np.median(real_values))
        spread = (max(real_values) - min(real_values)) / middle
        off = value / middle - 1
        within = abs(off) <= max(0.10, spread)
        rows[name] = {"measured": real_values, "simulated": value, "off": off, "spread": spread, "within": within}
        say(
            f"{lanes:>5}  {name:<13} {middle:>10.3f}  {spread:>6.1%}  {value:>10.3f}  {off:>+7.1%}  "
            f"{'yes' if within else 'NO'}"
        )
    return rows


def main() -> None:
    """Calibrate, measure, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    servers.add_arguments(parser)
    parser.add_argument("--loads", default="1,2,4", help="agents at once (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="real runs of each load (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="turns a run (default: %(default)s)")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "model": servers.find_model(args).name, "loads": {}}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        _, events = real(args, sessions(0, 2, args.turns), 1, log)
        turn_ms = outside_ms(log, events)
        real(args, sessions(-1, 4, args.turns), 3, log)
        node = calibrate(log, turn_ms)
        result["node"] = msgspec.to_builtins(node)
        say(show(node))
        say("\nload   figure          measured  spread   simulated      off  within")
        for lanes in (int(part) for part in args.loads.split(",")):
            played = sessions(lanes, 2 * max(2, lanes), args.turns)
            measured = [three(real(args, played, lanes, log)[0]) for _ in range(args.repeats)]
            result["loads"][lanes] = compare(measured, three(simulated(node, played, lanes)), lanes)
    write_json(args.json, result)


if __name__ == "__main__":
    main()
