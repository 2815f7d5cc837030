"""Fits a node's costs to its decision log: every step's calls and moves are there with what they took.

The log is replayed through the core, which knows the contexts that a decode read. Coefficients minimise absolute errors
(a machine that stalls now and then must not tilt them), none negative; then they are scaled so that all calls together
take what was measured, stalls included.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trunkline.core.actions import Decode, Prefill, StepPlan
from trunkline.core.facts import StepDone
from trunkline.core.policy import Core
from trunkline.core.types import CoreSettings
from trunkline.sim.costs import MeasuredCosts
from trunkline.sim.nodes import NodeFile, write_node
from trunkline.wire.journal import JournalError, read

LEAST_CALLS = 20
"""Fewer prefills or decodes than this say nothing about their cost."""
ROUNDS = 30
"""Reweighting rounds of the least absolute errors."""
SKIPPED = 3
"""The first steps of a log pay for first touches of memory."""


class CalibrationError(ValueError):
    """A log from which no costs can be fitted; the text says what it lacks."""


@dataclass(slots=True)
class Observed:
    """What a log holds: features and milliseconds of calls, bytes and milliseconds of moves, overheads of steps."""

    prefills: list[tuple[float, float, float]] = field(default_factory=list)
    prefill_ms: list[float] = field(default_factory=list)
    decodes: list[tuple[float, float, float]] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    moves: list[tuple[float, float]] = field(default_factory=list)
    move_ms: list[float] = field(default_factory=list)
    overhead_ms: list[float] = field(default_factory=list)

    def step(self, core: Core, plan: StepPlan, done: StepDone) -> None:
        """Take in one step; `core` has not been told of it."""
        spent_ms = sum(timing.ms for timing in done.moves)
        for timing in done.moves:
            if timing.ok and timing.bytes:
                self.moves.append((1.0, float(timing.bytes)))
                self.move_ms.append(timing.ms)
        for call, ms in zip(plan.calls, done.calls_ms, strict=True):
            if ms < 0:
                continue
            spent_ms += ms
            if isinstance(call, Prefill):
                tokens = call.end - call.start
                self.prefills.append((1.0, tokens, tokens * (call.start + tokens / 2)))
                self.prefill_ms.append(ms)
            elif isinstance(call, Decode):
                held = sum(core.state.turns[turn].held_tokens for turn, _ in call.turns)
                context = held + len(call.turns) * (done.repeats - 1) / 2
                self.decodes.append((1.0, len(call.turns), context))
                self.decode_ms.append(ms / done.repeats)
        self.overhead_ms.append((done.at_ms - plan.at_ms - spent_ms) / done.repeats)


def observe(log: Path) -> tuple[CoreSettings, Observed]:
    """Read a decision log. Raises `JournalError`, `OSError`, `CalibrationError`."""
    observed = Observed()
    core: Core | None = None
    settings: CoreSettings | None = None
    plan: StepPlan | None = None
    steps, busy_since = 0, None
    for entry in read(log):
        if isinstance(entry, CoreSettings):
            core, settings, plan, busy_since = Core(entry), entry, None, None
            continue
        if core is None:
            raise JournalError(f"{log}: a decision log begins with its settings")
        if isinstance(entry, StepPlan):
            plan = core.plan(entry.at_ms)
            if plan != entry:
                raise CalibrationError(f"{log}: plan {entry.seq} was made by another version of the core")
            if busy_since is not None and steps > SKIPPED:
                observed.overhead_ms[-1] += entry.at_ms - busy_since
            continue
        if isinstance(entry, StepDone) and plan is not None:
            steps += 1
            if steps > SKIPPED:
                observed.step(core, plan, entry)
        core.handle(entry)
        # Between steps the loop itself takes time, but only while somebody is being served it is not idle.
        busy_since = entry.at_ms if isinstance(entry, StepDone) else busy_since
        busy_since = busy_since if any(turn.slot is not None for turn in core.state.turns.values()) else None
    assert settings is not None
    for calls, what in ((observed.prefills, "prefills"), (observed.decodes, "decodes")):
        if len(calls) < LEAST_CALLS:
            raise CalibrationError(f"{log}: {len(calls)} {what} are too few to fit; serve more turns first")
    return settings, observed


def calibrate(log: Path, turn_ms: float = 0.0) -> NodeFile:
    """The node that wrote a decision log. Raises `JournalError`, `OSError`, `CalibrationError`."""
    settings, seen = observe(log)
    prefill, decode = fit(seen.prefills, seen.prefill_ms), fit(seen.decodes, seen.decode_ms)
    move = fit(seen.moves, seen.move_ms) if len(seen.moves) >= LEAST_CALLS else _plain_rate(seen)
    off = [*_relative(seen.prefills, seen.prefill_ms, prefill), *_relative(seen.decodes, seen.decode_ms, decode)]
    source = f"{len(seen.prefills)} prefills, {len(seen.decodes)} decodes, {len(seen.moves)} moves"
    costs = MeasuredCosts(
        prefill=(prefill[0], prefill[1], prefill[2]),
        decode=(decode[0], decode[1], decode[2]),
        move=(move[0], move[1]),
        step_ms=max(0.0, float(np.mean(seen.overhead_ms))),
        turn_ms=turn_ms,
        spread=float(1.4826 * np.median(np.abs(off))),
        source=source,
    )
    return NodeFile(settings=settings, costs=costs)


def fit(features: Sequence[Sequence[float]], ms: Sequence[float]) -> list[float]:
    """Non-negative coefficients of least absolute error, scaled so that the sum is right."""
    x, y = np.array(features), np.array(ms)
    scale = np.maximum(np.abs(x).max(axis=0), 1e-12)
    used = list(range(x.shape[1]))
    while True:
        solved = _least_absolute(x[:, used] / scale[used], y)
        if solved.min() >= 0 or len(used) == 1:
            break
        del used[int(solved.argmin())]
    found = np.zeros(x.shape[1])
    found[used] = np.maximum(solved, 0.0) / scale[used]
    predicted = float((x @ found).sum())
    found *= float(y.sum()) / predicted if predicted else 1.0
    return [float(c) for c in found]


def _least_absolute(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Iteratively reweighted least squares (Schlossmacher, JASA 68, 1973)."""
    weights: NDArray[np.float64] = np.ones(len(y))
    solved: NDArray[np.float64] = np.zeros(x.shape[1])
    least = 1e-3 * max(float(np.median(y)), 1e-9)
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        solved = np.asarray(np.linalg.lstsq(x * root[:, None], y * root, rcond=None)[0], np.float64)
        off = np.maximum(np.abs(y - x @ solved), least)
        weights = np.asarray(1.0 / off, np.float64)
    return solved


def _relative(features: Sequence[Sequence[float]], ms: Sequence[float], found: Sequence[float]) -> list[float]:
    predicted = np.array(features) @ np.array(found)
    return [float(r) for r in (np.array(ms) - predicted) / np.maximum(predicted, 1e-9)]


def _plain_rate(seen: Observed) -> list[float]:
    """Too few moves for a line: their mean rate, or none measured."""
    moved = sum(size for _, size in seen.moves)
    return [0.0, sum(seen.move_ms) / moved if moved else 0.0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--decision-log", type=Path, required=True, help="what a server wrote that ran with `serve --decision-log`"
    )
    parser.add_argument("--turn-ms", type=float, default=0.0, help="what a turn costs outside the engine (default: 0)")
    parser.add_argument("--json", type=Path, required=True, help="write the node here, for `trunkline sim --node`")


def run(args: argparse.Namespace) -> int:
    """Fit, show, write. Returns the exit code."""
    try:
        node = calibrate(args.decision_log, args.turn_ms)
        write_node(args.json, node)
    except (CalibrationError, JournalError, OSError) as error:
        print(f"trunkline calibrate: {error}", file=sys.stderr)
        return 1
    print(show(node))
    return 0


def show(node: NodeFile) -> str:
    """A node's costs as lines for people."""
    costs, settings = node.costs, node.settings
    rate = 1 / costs.move[1] / 1e6 if costs.move[1] else 0.0
    lines = [
        f"from {costs.source}; a call is {costs.spread:.0%} off its fit",
        f"prefill slice  {costs.prefill[0]:.2f} ms + {costs.prefill[1]:.4f} a token + attention; "
        f"256 tokens at 0: {costs.prefill_ms(256, 0):.0f} ms, at {settings.slot_tokens // 2:,}: "
        f"{costs.prefill_ms(256, settings.slot_tokens // 2):.0f} ms",
        f"decode step    {costs.decode[0]:.2f} ms + {costs.decode[1]:.3f} a turn + context; "
        f"1 turn at 512: {costs.decode_ms(1, 512):.1f} ms, {settings.slots} turns: "
        f"{costs.decode_ms(settings.slots, 512 * settings.slots):.1f} ms",
        f"move           {costs.move[0]:.2f} ms" + (f" + {rate:,.1f} GB/s" if rate else ""),
        f"a step besides {costs.step_ms:.2f} ms; a turn besides {costs.turn_ms:.2f} ms",
    ]
    return "\n".join(lines)
