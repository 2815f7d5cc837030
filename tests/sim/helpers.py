"""Builders for simulations."""

import itertools
from collections.abc import Sequence
from typing import Any

from trunkline.core import invariants
from trunkline.core.types import CoreSettings
from trunkline.sim.agents import Workload
from trunkline.sim.costs import MeasuredCosts
from trunkline.sim.memory import Memory
from trunkline.sim.simulation import Simulation
from trunkline.wire.traces import Fork, RunTrace, Session, TokensPrompt, TurnTrace

COSTS = MeasuredCosts(prefill=(5.0, 1.0, 0.0), decode=(6.0, 2.0, 0.001), move=(0.1, 1e-6))
PER_TOKEN = 1000


def make_settings(**changes: Any) -> CoreSettings:
    """Two slots of 1,024 tokens, host memory for 10,000."""
    values: dict[str, Any] = {
        "slots": 2,
        "slot_tokens": 1024,
        "host_bytes": 10_000 * PER_TOKEN,
        "bytes_per_token": PER_TOKEN,
    }
    return CoreSettings(**(values | changes))


def turn(keep: int, add: Sequence[int], out: int = 4, gap_ms: float | None = None) -> TurnTrace:
    """A turn of token ids."""
    return TurnTrace(prompt=TokensPrompt(keep=keep, add=tuple(add)), output_tokens=out, gap_ms=gap_ms)


def run(name: str, *turns: TurnTrace, fork: Fork | None = None) -> RunTrace:
    return RunTrace(id=name, turns=turns, fork=fork)


def loop(name: str, turns: int, *, first: int = 40, more: int = 10, out: int = 4, gap_ms: float = 50.0) -> RunTrace:
    """A run whose every prompt holds the one before and the answer to it; its tokens are like no other name's."""
    base = 100_000 + sum(ord(letter) * 131**at for at, letter in enumerate(name)) % 800_000
    lengths = [first + at * (out + more) for at in range(turns)]
    made = [turn(0, range(base, base + first), out)]
    for before, length in itertools.pairwise(lengths):
        made.append(turn(before, range(base + before, base + length), out, gap_ms))
    return run(name, *made)


def simulate(sessions: Sequence[Session], workload: Workload | None = None, **changes: Any) -> Simulation:
    """Play to the end, everything checked after every fact and plan. `changes` go to settings and `Simulation`."""
    ours = {key: changes.pop(key) for key in ("noise", "faults", "journal", "skip_ahead") if key in changes}
    settings = make_settings(**changes)
    sim = Simulation(sessions, workload or Workload(), settings, COSTS, memory=Memory, check=invariants.check, **ours)
    sim.run()
    assert not sim.agents.playing
    return sim
