"""Admission in the simulator: what becomes of a node past saturation, without admission, with it, and with caps.

    python benchmarks/admission.py --data WEKA_FILE [--loads 4,8,16,32] [--modes off,predicted,runs-cap:8] [--shift]

A model of 480 B weights (35 B active, FP8) on 8 H200, whose memory holds eight contexts of 262,144 tokens: coding
agents of recorded sessions, `--loads` of them at once, each with the next session when one is over; a refused one comes
back when it was told to. Figures are those of `--hours` simulated, the first quarter of which is not counted. Goodput
counts runs within a stretch of `--stretch`, counted from when they were let in or into the line. With `--shift` half
the memory is behind the slots, and contexts grow fourfold in the middle.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from trunkline.core.types import Admission, CoreSettings
from trunkline.sim.agents import Arrival, Workload
from trunkline.sim.hardware import HARDWARE
from trunkline.sim.roofline import ModelConfig, Roofline
from trunkline.sim.simulation import Simulation
from trunkline.wire.formats import AUTO, read_trace_sessions
from trunkline.wire.reshape import scale
from trunkline.wire.spread import Spread
from trunkline.wire.traces import Session

MODEL = ModelConfig(
    hidden_size=6144,
    num_hidden_layers=62,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=8192,
    moe_intermediate_size=2560,
    num_experts=160,
    num_experts_per_tok=8,
    vocab_size=151936,
    max_position_embeddings=262144,
)
CTX = 262_144
SHORT_TOKENS = 64
WARM_UP = 0.25


def chosen(data: Path, count: int) -> list[Session]:
    """Sessions of 10 to 80 turns whose every prompt fits a slot."""
    found: list[Session] = []
    for session in read_trace_sessions(data, AUTO):
        fits = all(
            run.prompt_tokens(turn) + (run.turns[turn].output_tokens or 0) + 8 <= CTX
            for run in session
            for turn in range(len(run.turns))
        )
        if fits and 10 <= sum(len(run.turns) for run in session) <= 80:
            found.append(session)
        if len(found) == count:
            break
    return found


def again_and_again(sessions: list[Session]) -> Iterator[Session]:
    """The sessions in a circle, with new names each time round."""
    for lap in itertools.count():
        for session in sessions:
            yield tuple(
                msgspec.structs.replace(
                    run,
                    id=f"{run.id}+{lap}",
                    fork=run.fork and msgspec.structs.replace(run.fork, parent=f"{run.fork.parent}+{lap}"),
                )
                for run in session
            )


def node(mode: str, args: argparse.Namespace) -> tuple[CoreSettings, Roofline]:
    """The node, under one kind of admission (`runs-cap:8`: with that cap)."""
    costs = Roofline(MODEL, HARDWARE["h200"], 8, weight_bytes=1.0)
    name, _, cap = mode.partition(":")
    settings = CoreSettings(
        slots=4 if args.shift else 8,
        slot_tokens=CTX,
        host_bytes=4 * CTX * costs.kv_bytes_per_token if args.shift else 0,
        bytes_per_token=costs.kv_bytes_per_token,
        max_slice_tokens=8192,
        max_tree_symbols=10**9,
        admission=Admission(name),
        stretch_objective=args.stretch,
        max_wait_ms=60_000.0,
    )
    return (replace(settings, admission_cap=int(cap)) if cap else settings), costs


def simulated(mode: str, load: int, sessions: list[Session], args: argparse.Namespace) -> dict[str, Any]:
    """One load under one kind of admission."""
    settings, costs = node(mode, args)
    end_ms = args.hours * 3.6e6
    began = time.monotonic()
    workload = Workload(arrival=Arrival.LANES, load=load, gap_cap_ms=args.gap_cap * 1e3)
    clock: list[Simulation] = []

    def stream() -> Iterator[Session]:
        for session in again_and_again(sessions):
            shrunk = args.shift and (not clock or clock[0].clock.now_ms < end_ms / 2)
            yield tuple(scale(run, 4, 1) for run in session) if shrunk else session

    sim = Simulation(stream(), workload, settings, costs)
    clock.append(sim)
    sim.run(until_ms=end_ms)
    return counted(sim, end_ms, args.stretch) | {
        "mode": mode,
        "load": load,
        "simulated_in_s": time.monotonic() - began,
    }


def counted(sim: Simulation, end_ms: float, objective: float) -> dict[str, Any]:
    """The figures after the warm-up."""
    begin_ms = WARM_UP * end_ms
    hours = (end_ms - begin_ms) / 3.6e6
    turns = [turn for turn in sim.agents.turns if turn.well and turn.ended_ms >= begin_ms]
    done = [run for run in sim.agents.runs if run.ended_ms is not None and run.ended_ms >= begin_ms and not run.error]
    short = Spread.of(turn.latency_ms for turn in turns if turn.completion_tokens <= SHORT_TOKENS)
    first = Spread.of(turn.first_token_ms - turn.submitted_ms for turn in turns if turn.first_token_ms is not None)
    stretch = Spread.of(run.stretch for run in done)
    tally = sim.node.core.state.admission.tally
    return {
        "goodput_per_h": sum(run.stretch <= objective for run in done) / hours,
        "completed_per_h": len(done) / hours,
        "turns_per_h": len(turns) / hours,
        "reuse": sum(turn.cached_tokens for turn in turns) / max(1, sum(turn.reusable_tokens for turn in turns)),
        "short_p95_ms": short.p95 if short else None,
        "ttft_p50_ms": first.p50 if first else None,
        "stretch_p50": stretch.p50 if stretch else None,
        "stretch_p95": stretch.p95 if stretch else None,
        "refusals": sum(run.refusals for run in sim.agents.runs),
        "late_refusals": sum(run.late_refusals for run in sim.agents.runs),
        "broken_promises": sim.node.total_broken_promises,
        "predicted_turns": tally.predicted_turns / max(1, tally.ended),
        "actual_turns": tally.actual_turns / max(1, tally.ended),
        "predicted_peak_tokens": tally.predicted_tokens / max(1, tally.ended),
        "actual_peak_tokens": tally.actual_tokens / max(1, tally.ended),
        "retry_after_ratio": sim.node.core.state.admission.gauges()["retry_after_ratio"],
    }


def main() -> None:
    """Print a line a simulation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a file of Weka sessions")
    parser.add_argument("--sessions", type=int, default=100, help="of them (default: %(default)s)")
    parser.add_argument("--loads", default="4,8,16,32", help="agents at once (default: %(default)s)")
    parser.add_argument("--modes", default="off,predicted", help="kinds of admission (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=2.0, help="simulated time (default: %(default)s)")
    parser.add_argument("--gap-cap", type=float, default=10.0, help="longest tool gap, s (default: %(default)s)")
    parser.add_argument("--stretch", type=float, default=2.0, help="objective (default: %(default)s)")
    parser.add_argument("--shift", action="store_true", help="let contexts grow fourfold in the middle")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    sessions = chosen(args.data, args.sessions)
    found = []
    print("admission     load  goodput/h  done/h   reuse  short p95 ms  TTFT p50 ms  stretch p50  p95  refusals")
    for load in map(int, args.loads.split(",")):
        for mode in args.modes.split(","):
            row = simulated(mode, load, sessions, args)
            found.append(row)
            cells = [row[key] or 0.0 for key in ("short_p95_ms", "ttft_p50_ms", "stretch_p50", "stretch_p95")]
            print(
                f"{mode:<12} {load:>5} {row['goodput_per_h']:>10.1f} {row['completed_per_h']:>7.1f}",
                f"{row['reuse']:>7.3f} {cells[0]:>13,.0f} {cells[1]:>12,.0f} {cells[2]:>12.2f} {cells[3]:>4.1f}",
                f"{row['refusals']:>9}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
