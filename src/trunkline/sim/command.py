"""The sim command: what a node would make of a trace, at one load or at several."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec

from trunkline.core.types import Admission, CoreSettings, Eviction, Order, Sharing
from trunkline.sim.agents import Answers, Arrival, Workload
from trunkline.sim.costs import Costs, Noise
from trunkline.sim.figures import figures
from trunkline.sim.hardware import HARDWARE
from trunkline.sim.nodes import NodeFileError, read_node
from trunkline.sim.report import Report, Result, page
from trunkline.sim.roofline import MODELS, ModelError, Roofline, read_model
from trunkline.sim.simulation import Simulation
from trunkline.wire.formats import AUTO, FORMATS, read_trace_sessions
from trunkline.wire.journal import Journal
from trunkline.wire.reshape import scale
from trunkline.wire.spread import Spread
from trunkline.wire.traces import Session, TraceError

GPU_SLICE_TOKENS = 8192
"""Longest prefill slice of a simulated accelerator: as vLLM's and SGLang's chunked prefill use."""
MAX_SLOTS = 256
TREE_SYMBOLS = 200_000_000
"""A simulation remembers every trajectory as long as memory reasonably allows (4 to 8 bytes a symbol)."""


class SimError(ValueError):
    """A simulation that cannot be set up as asked; the text names what to change."""


def add_arguments(parser: argparse.ArgumentParser, size: Callable[[str], int]) -> None:
    """Declare the command's options. `size` reads `80MB`."""
    trace = parser.add_argument_group("the trace")
    trace.add_argument("--trace", type=Path, required=True, help="trace file, or a folder of them")
    trace.add_argument("--format", choices=[AUTO, *FORMATS], default=AUTO, help="its format (default: told by content)")
    trace.add_argument("--scale", type=int, default=1, help="divide block, input and output sizes by this")
    trace.add_argument("--scale-output", type=int, help="divide outputs by this instead")
    trace.add_argument("--runs", type=int, help="play at most this many sessions")
    trace.add_argument(
        "--answers", choices=list(Answers), default=Answers.FED_BACK, help="are answers in later prompts?"
    )
    load = parser.add_argument_group("the load")
    load.add_argument("--arrival", choices=list(Arrival), default=Arrival.LANES, help="how sessions begin")
    load.add_argument(
        "--load",
        type=_loads,
        default=(8.0,),
        help="agents at once, or sessions an hour for poisson; as 1,2,4,8: one after the other (default: 8)",
    )
    load.add_argument("--ramp", type=float, default=0.0, help="seconds over which the agents begin (default: at once)")
    load.add_argument("--gap-scale", type=float, default=1.0, help="multiply tool gaps (default: %(default)s)")
    load.add_argument("--gap-cap", type=float, default=60.0, help="longest tool gap, s (default: %(default)s)")
    load.add_argument("--max-tokens", type=int, help="what turns ask for at most (default: exactly what they generate)")
    load.add_argument("--finish", action="store_true", help="agents say when a run is over (most never do)")
    node = parser.add_argument_group("the node")
    node.add_argument("--node", type=Path, help="a node that `trunkline calibrate` measured, instead of a roofline")
    node.add_argument(
        "--model",
        default="qwen3-coder-30b-a3b",
        help=f"config.json, or one of {', '.join(MODELS)} (default: %(default)s)",
    )
    node.add_argument("--hardware", choices=HARDWARE, default="h100", help="accelerator (default: %(default)s)")
    node.add_argument(
        "--devices", type=int, default=8, help="accelerators that the model is split over (default: %(default)s)"
    )
    node.add_argument("--ctx", type=int, help="tokens a slot holds (default: what the model can)")
    node.add_argument("--slots", type=int, help="turns in flight (default: what device memory holds)")
    node.add_argument(
        "--host-bytes",
        type=size,
        metavar="SIZE",
        help="host memory for remembered prefixes (default: as much as all slots hold)",
    )
    node.add_argument("--slice-tokens", type=int, help=f"longest prefill slice (default: {GPU_SLICE_TOKENS})")
    node.add_argument("--sharing", choices=list(Sharing), help="as `serve`")
    node.add_argument("--eviction", choices=list(Eviction), help="as `serve`")
    node.add_argument("--order", choices=list(Order), help="as `serve`")
    node.add_argument("--admission", choices=list(Admission), help="as `serve` (default: off)")
    node.add_argument("--admission-cap", type=int, help="as `serve`")
    node.add_argument("--stretch-objective", type=float, help="as `serve`")
    node.add_argument("--max-wait-s", type=float, help="as `serve`")
    node.add_argument(
        "--noise", type=float, help="relative spread of step times (default: as measured; 0 for a roofline)"
    )
    node.add_argument("--price", type=float, help="USD an hour, for the cost of a run")
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals and noise (default: %(default)s)")
    parser.add_argument(
        "--stretch",
        type=float,
        default=2.0,
        help="goodput counts runs that took at most this times their ideal (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="write the figures and the timeline here")
    parser.add_argument("--report", type=Path, help="write the curves here, as one HTML page")
    parser.add_argument("--decision-log", type=Path, help="write every fact and plan here (one load only)")


def run(args: argparse.Namespace) -> int:
    """Simulate every load, print the figures, write what was asked for. Returns the exit code."""
    try:
        report = simulate(args)
    except (SimError, TraceError, ModelError, NodeFileError, ValueError, OSError) as error:
        print(f"trunkline sim: {error}", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if args.report:
        args.report.write_text(page(report), encoding="utf-8")
    return 0


def simulate(args: argparse.Namespace) -> Report:
    """All loads of the command line."""
    settings, costs, spread = the_node(args)
    if args.decision_log and len(args.load) > 1:
        raise SimError("--decision-log takes one --load: a log is one simulation's")
    print(
        f"{settings.slots} slots of {settings.slot_tokens:,} tokens, {settings.host_bytes / 1e9:,.1f} GB of host memory"
    )
    results = []
    for load in args.load:
        workload = Workload(
            arrival=Arrival(args.arrival),
            load=load,
            ramp_ms=args.ramp * 1e3,
            gap_scale=args.gap_scale,
            gap_cap_ms=args.gap_cap * 1e3,
            max_new_tokens=args.max_tokens,
            answers=Answers(args.answers),
            finishes=args.finish,
            seed=args.seed,
        )
        results.append(one_load(args, workload, settings, costs, Noise(args.seed, spread)))
        print(show(results[-1]), flush=True)
    return Report(trace=args.trace.name, seed=args.seed, settings=settings, results=results)


def one_load(
    args: argparse.Namespace, workload: Workload, settings: CoreSettings, costs: Costs, noise: Noise
) -> Result:
    """One simulation."""
    journal = Journal(args.decision_log, settings) if args.decision_log else None
    sim = Simulation(the_sessions(args), workload, settings, costs, noise=noise, journal=journal)
    began = time.monotonic()
    progress = Progress(sim)
    sim.run(on_event=progress.event)
    progress.end()
    if journal is not None:
        journal.close()
    counted = figures(
        sim.agents.turns,
        sim.agents.runs,
        busy_ms=sim.node.busy_ms,
        broken_promises=sim.node.total_broken_promises,
        stretch_objective=args.stretch,
        usd_per_h=args.price,
    )
    return Result(
        load=workload.load,
        figures=counted,
        timeline=sim.timeline.samples,
        plans=sim.node.plans,
        steps=sim.node.steps,
        simulated_in_s=time.monotonic() - began,
    )


def the_sessions(args: argparse.Namespace) -> Iterator[Session]:
    """The trace, scaled and cut. Raises `TraceError`, and ValueError for a trace that does not scale."""
    for session in islice(read_trace_sessions(args.trace, args.format), args.runs):
        if args.scale != 1 or args.scale_output:
            yield tuple(scale(run, args.scale, args.scale_output) for run in session)
        else:
            yield session


def the_node(args: argparse.Namespace) -> tuple[CoreSettings, Costs, float]:
    """Settings, costs and their spread. Raises `SimError`, `ModelError`, `NodeFileError`."""
    costs: Costs
    if args.node is not None:
        measured = read_node(args.node)
        settings, costs, spread = measured.settings, measured.costs, measured.costs.spread
    else:
        settings, costs = roofline_node(args)
        spread = 0.0
    settings = replace(
        settings,
        slots=args.slots or settings.slots,
        slot_tokens=args.ctx or settings.slot_tokens,
        host_bytes=settings.host_bytes if args.host_bytes is None else args.host_bytes,
        max_slice_tokens=args.slice_tokens or settings.max_slice_tokens,
        max_tree_symbols=max(settings.max_tree_symbols, TREE_SYMBOLS),
        sharing=Sharing(args.sharing or settings.sharing),
        eviction=Eviction(args.eviction or settings.eviction),
        order=Order(args.order or settings.order),
        admission=Admission(args.admission or settings.admission),
        admission_cap=args.admission_cap or settings.admission_cap,
        stretch_objective=args.stretch_objective or settings.stretch_objective,
        max_wait_ms=settings.max_wait_ms if args.max_wait_s is None else args.max_wait_s * 1e3,
    )
    return settings, costs, spread if args.noise is None else args.noise


def roofline_node(args: argparse.Namespace) -> tuple[CoreSettings, Roofline]:
    """A node that nobody measured."""
    model = read_model(args.model)
    costs = Roofline(model, HARDWARE[args.hardware], args.devices)
    ctx = args.ctx or model.max_position_embeddings
    fits = costs.kv_bytes // (ctx * costs.kv_bytes_per_token)
    slots = args.slots or min(MAX_SLOTS, fits)
    if slots < 1 or slots > fits:
        raise SimError(
            f"{args.devices} x {args.hardware} hold {max(0, costs.kv_bytes) / 1e9:.1f} GB of KV beside the weights: "
            f"{max(0, fits)} slots of {ctx:,} tokens; add --devices or lower --ctx or --slots"
        )
    slot_bytes = ctx * costs.kv_bytes_per_token
    settings = CoreSettings(
        slots=slots,
        slot_tokens=ctx,
        host_bytes=slots * slot_bytes,
        bytes_per_token=costs.kv_bytes_per_token,
        max_slice_tokens=GPU_SLICE_TOKENS,
    )
    return settings, costs


# --- for people ---------------------------------------------------------------------------------------------------


class Progress:
    """A line on stderr every two seconds."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._began = self._shown = time.monotonic()
        self._events = 0

    def event(self) -> None:
        """Something happened in the simulation; shows where it is if it is time."""
        self._events += 1
        if self._events % 256 or time.monotonic() - self._shown < 2:
            return
        self._shown = time.monotonic()
        turns, hours = len(self._sim.agents.turns), self._sim.clock.now_ms / 3.6e6
        rate = turns / (self._shown - self._began)
        line = f"{turns:,} turns, {hours:,.1f} simulated hours, {self._shown - self._began:.0f} s, {rate:,.0f} turns/s "
        print(f"\r{line}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Finish the line, if one was begun."""
        if self._shown != self._began:
            print(file=sys.stderr)


def show(result: Result) -> str:
    """One load's figures as lines for people."""
    found = result.figures
    pace = found.interactivity
    cost = "not priced (--price)" if found.cost_per_run_usd is None else f"{found.cost_per_run_usd:.4f} USD a run"
    lines = [
        f"load {result.load:g}",
        f"  runs           {found.completed_runs} of {found.runs} completed, {found.failed_runs} failed, "
        f"{found.refusals} refusals; {found.turns:,} turns in {found.wall_s / 3600:,.2f} h",
        f"  run completion {_spread(found.completion_s, 's')}",
        f"  reuse          {_percent(found.reuse)} of reusable tokens; {_percent(found.cached_share)} of prompt tokens",
        f"  step latency   {_spread(found.latency_ms, 'ms')}",
        f"    short steps  {_spread(found.short_latency_ms, 'ms')}",
        f"  first token    {_spread(found.ttft_ms, 'ms')}",
        "  interactivity  " + (f"p90 {pace.p90:,.1f}, p99 {pace.p99:,.1f} tokens/s a run" if pace else "not measured"),
        f"  stretch        {_spread(found.stretch, '')}",
        f"  goodput        {found.goodput_per_h:,.1f} runs/h within a stretch of {found.stretch_objective:g}, "
        f"of {found.completed_per_h:,.1f} completed",
        f"  broken promises {found.broken_promises}; cost {cost}; busy {found.busy_share:.0%}",
        f"  tokens         {found.prompt_tokens:,} in ({found.novel_tokens:,} novel), {found.completion_tokens:,} out, "
        f"{found.tokens_per_s:,.1f} out/s",
        f"  simulated in   {result.simulated_in_s:.1f} s: {result.plans:,} plans, {result.steps:,} steps",
    ]
    return "\n".join(lines)


def _spread(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return "not measured"
    digits = 0 if unit == "ms" else 2
    named = ("mean", spread.mean), ("p50", spread.p50), ("p95", spread.p95), ("p99", spread.p99)
    return ", ".join(f"{name} {value:,.{digits}f}" for name, value in named) + f" {unit} ({spread.count:,})".replace(
        "  ", " "
    )


def _percent(share: float | None) -> str:
    return "nothing" if share is None else f"{share:.2%}"


def _loads(text: str) -> tuple[float, ...]:
    """`1,2,4` as numbers."""
    try:
        loads = tuple(float(part) for part in text.split(","))
    except ValueError:
        loads = ()
    if not loads or min(loads) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write loads as positive numbers, like 1,2,4,8")
    return loads
