"""Deterministic simulation testing: one seed makes a workload, a node's settings and everything that goes wrong.

First a safety phase, with faults: loads and calls fail, steps take far too long, the node restarts, its cache is reset,
clients vanish in any state, tools answer early, late or never, memory is far too small. Then a liveness phase without:
every run that is left ends within a bound. Every law of the core is checked after every fact and every plan, and every
move and call against what the node's memory would hold.

    python -m tests.sim.chaos [--first SEED] [--count N]
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from trunkline.core import invariants
from trunkline.core.types import Admission, CoreSettings, Eviction, MemoryKind, Order, Sharing
from trunkline.sim.agents import Arrival, Workload
from trunkline.sim.costs import MeasuredCosts, Noise
from trunkline.sim.faults import FaultRates, Faults
from trunkline.sim.memory import Memory
from trunkline.sim.simulation import Simulation
from trunkline.wire.journal import Journal
from trunkline.wire.traces import Fork, RunTrace, Session, TokensPrompt, TurnTrace

SYMBOLS = 3
"""Prompts are spelled with so few symbols that prefixes collide all the time."""
SLOT_TOKENS = 96
PER_TOKEN = 1000
SAFETY_MS = 20_000.0
LIVENESS_MS = 600_000.0
"""Everything is over so long after the last fault: many times what all of it takes alone."""
NEVER_MS = 400_000.0
"""A tool that answers so late that nobody waits for it any more."""


@dataclass
class Scenario:
    """What one seed makes."""

    seed: int
    settings: CoreSettings
    workload: Workload
    sessions: list[Session]
    rates: FaultRates
    blows: list[tuple[float, str]] = field(default_factory=list)
    """(at_ms, what): `leave` a client vanishes, `restart`, `reset`."""


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"chaos {seed}")
    calm = rng.random() < 0.3
    rates = (
        FaultRates()
        if calm
        else FaultRates(
            load=rng.choice([0.0, 0.1, 0.5]), call=rng.choice([0.0, 0.01, 0.1]), spike=rng.choice([0.0, 0.02])
        )
    )
    kinds = (
        ["leave"] * rng.choice([0, 2, 8]) + ["reset"] * rng.choice([0, 0, 2]) + ["restart"] * rng.choice([0, 0, 1, 3])
    )
    blows = sorted((rng.uniform(0, SAFETY_MS), kind) for kind in kinds)
    workload = Workload(
        arrival=rng.choice(list(Arrival)),
        load=0.0,
        ramp_ms=rng.choice([0.0, 2000.0]),
        gap_cap_ms=NEVER_MS,
        max_new_tokens=rng.choice([None, 16]),
        finishes=random.Random(f"finishes {seed}").random() < 0.5,
        seed=seed,
    )
    load = 3600.0 if workload.arrival is Arrival.POISSON else float(rng.randint(1, 8))
    workload = Workload(**{name: getattr(workload, name) for name in workload.__slots__} | {"load": load})
    return Scenario(seed, _settings(rng), workload, [_session(rng, n) for n in range(rng.randint(2, 8))], rates, blows)


def _settings(rng: random.Random) -> CoreSettings:
    return CoreSettings(
        slots=rng.randint(1, 4),
        slot_tokens=SLOT_TOKENS,
        host_bytes=rng.choice([0, 8, 40, 150, 5000]) * PER_TOKEN,
        bytes_per_token=PER_TOKEN,
        checkpoint_bytes=rng.choice([0, 5 * PER_TOKEN]),
        memory=rng.choice([MemoryKind.CUTTABLE, MemoryKind.CUTTABLE, MemoryKind.CHECKPOINTS]),
        sharing=rng.choice([Sharing.TREE, Sharing.TREE, Sharing.TREE, Sharing.OFF]),
        eviction=rng.choice(list(Eviction)),
        order=rng.choice([Order.SHORT_FIRST, Order.SHORT_FIRST, Order.FCFS]),
        step_budget_ms=rng.choice([20.0, 100.0]),
        max_slice_tokens=rng.choice([3, 16, 256]),
        min_slice_tokens=rng.choice([1, 8]),
        max_queue=rng.choice([1, 2, 1024]),
        max_tree_symbols=rng.choice([60, 10_000]),
        admission=rng.choice([Admission.PREDICTED, Admission.PREDICTED, *Admission]),
        admission_cap=rng.choice([1, 3]),
        stretch_objective=rng.choice([1.2, 4.0]),
        max_waiting_runs=rng.choice([0, 2, 256]),
        max_wait_ms=rng.choice([0.0, 1000.0, 60_000.0]),
    )


def _session(rng: random.Random, number: int) -> Session:
    root = _run(rng, f"s{number}", [], None)
    session = [root]
    for child in range(rng.choice([0, 0, 1, 3])):
        after = rng.randint(0, len(root.turns))
        joins = rng.choice([None, rng.randint(after, len(root.turns))])
        inherited = _prompts(root)[after - 1] if after else []
        session.append(_run(rng, f"s{number}/{child}", inherited, Fork(root.id, after, joins)))
    return tuple(session)


def _run(rng: random.Random, name: str, inherited: Sequence[int], fork: Fork | None) -> RunTrace:
    """Most turns hold the prompt before them and the answer to it; some edit their history, some start over."""
    turns: list[TurnTrace] = []
    length = len(inherited)
    for _ in range(rng.randint(1, 6)):
        keep = rng.choice([length, length, length, rng.randint(0, length), 0])
        add = tuple(rng.randrange(SYMBOLS) for _ in range(rng.randint(1, 14)))
        out = rng.choice([1, 2, 5, 9])
        gap_ms = rng.choice([0.0, 1.0, 50.0, 3000.0, NEVER_MS if rng.random() < 0.1 else 10.0])
        turns.append(TurnTrace(prompt=TokensPrompt(keep=keep, add=add), output_tokens=out, gap_ms=gap_ms))
        length = keep + len(add)
    return RunTrace(id=name, turns=tuple(turns), fork=fork)


def _prompts(run: RunTrace) -> list[list[int]]:
    prompts: list[list[int]] = []
    for turn in run.turns:
        assert isinstance(turn.prompt, TokensPrompt)
        prompts.append([*(prompts[-1] if prompts else [])[: turn.prompt.keep], *turn.prompt.add])
    return prompts


COSTS = MeasuredCosts(prefill=(5.0, 1.4, 0.001), decode=(6.0, 3.0, 0.002), move=(0.2, 1e-6), step_ms=0.5, turn_ms=1.0)


class Play:
    """One scenario being played."""

    def __init__(self, made: Scenario, journal: Journal | None = None) -> None:
        self.made = made
        self.faults = Faults(made.seed, made.rates)
        self.rng = random.Random(f"blows {made.seed}")
        self.sim = Simulation(
            made.sessions,
            made.workload,
            made.settings,
            COSTS,
            noise=Noise(made.seed, 0.2),
            faults=self.faults,
            journal=journal,
            memory=Memory,
            check=invariants.check,
        )
        for at_ms, kind in made.blows:
            self.sim.clock.at(
                at_ms, {"leave": self._leave, "reset": self._reset, "restart": self.sim.restart_node}[kind]
            )

    def _leave(self) -> None:
        playing = self.sim.agents.playing
        if playing:
            self.sim.agents.leave(playing[self.rng.choice(sorted(playing))])

    def _reset(self) -> None:
        self.sim.node.reset(self.sim.clock.now_ms)

    def run(self) -> None:
        """Both phases, and what must be true at the end."""
        self.sim.run(until_ms=SAFETY_MS)
        self.faults.stop()
        self.sim.run(until_ms=SAFETY_MS + NEVER_MS * 8 + LIVENESS_MS)
        agents, node = self.sim.agents, self.sim.node
        assert agents.exhausted or self.made.workload.arrival is Arrival.LANES, "every session began"
        assert not agents.playing, f"runs that never ended: {sorted(agents.playing)}"
        assert not node.live and not node.core.state.turns, "no turn is left"
        assert self._some_ended_early() or len(agents.runs) == sum(map(len, self.made.sessions)), "every run began"
        assert sum(run.late_refusals for run in agents.runs) == 0, "a run that has begun is never refused"
        if not self.made.rates.load:
            assert node.total_broken_promises == 0, "a planned hit is a hit"
        for turn in agents.turns:
            assert turn.cached_tokens <= turn.prompt_tokens
            assert self.made.settings.sharing is Sharing.TREE or turn.cached_tokens == 0

    def _some_ended_early(self) -> bool:
        """Whether a run ended early: then what it would have forked never began."""
        return any(run.error is not None for run in self.sim.agents.runs)


def play(seed: int, journal: Journal | None = None) -> None:
    """Play a seed; raises AssertionError (or whatever broke) if it fails."""
    Play(scenario(seed), journal).run()


def main() -> int:
    """Seeds one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed (default: %(default)s)")
    parser.add_argument("--count", type=int, help="how many seeds (default: no end)")
    args = parser.parse_args()
    seeds: Iterator[int] = count(args.first) if args.count is None else islice(count(args.first), args.count)
    began = shown = time.monotonic()
    failed = 0
    for done, seed in enumerate(seeds, 1):
        try:
            play(seed)
        except Exception as error:
            failed += 1
            print(f"\nseed {seed}: {type(error).__name__}: {error}", flush=True)
        if time.monotonic() - shown > 2:
            shown = time.monotonic()
            print(f"\r{done} seeds, {failed} failed, {shown - began:.0f} s ", end="", file=sys.stderr, flush=True)
    print(f"\n{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
