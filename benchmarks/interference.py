"""Interference: warm 16-token steps of one run while another run prefills 6,000 tokens.

Four phases a server, each on prompts nobody has sent before:

1. steps alone, half a second apart: their p95, and their sum
2. the prefill alone
3. both: steps half a second apart for as long as a prefill is in flight (more prefills until there are enough steps)
4. both, steps back to back, with a prefill of 2,000 tokens: how much of its speed alone the prefill keeps

Targets: p95 in 3 at most twice that of 1; wall time of 3 at most 1.1 x (prefill alone + its steps alone).
A server that makes steps wait for a whole prefill yields few steps a prefill, so the baseline gets its own, smaller
number of prefills (`--baseline-prefills`): each of its samples is one wait.

    python benchmarks/interference.py [--steps 40] [--json OUT]
"""

import argparse
import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import servers
from measure import complete, machine, percentile, say, with_endpoint, write_json
from trunkline.bench.client import Endpoint
from trunkline.bench.filler import Filler

SLOTS, CTX, HOST_MIB = 4, 8192, 512
PREFILL_TOKENS, PACKED_TOKENS, BASE_TOKENS, STEP_INPUT, STEP_OUTPUT = 6000, 2000, 400, 8, 16
PAUSE_S = 0.5
MOST_PREFILLS = 10


@dataclass
class Steps:
    """One run of short steps: its prompt grows by a few filler tokens a step. `ms` are the latencies."""

    endpoint: Endpoint
    model: str
    name: str
    filler: Filler = field(default_factory=Filler)
    prompt: list[int] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    async def warm(self) -> None:
        """Send the base prompt, so that every step extends something known."""
        self.prompt = self.filler.tokens(self.name, [0], BASE_TOKENS, "", 0)
        await complete(self.endpoint, self.model, self.prompt, 1)

    async def step(self) -> None:
        """One timed step."""
        self.prompt = self.prompt + self.filler.tokens(self.name, [1 + len(self.ms)], STEP_INPUT, "", 0)
        reply = await complete(self.endpoint, self.model, self.prompt, STEP_OUTPUT)
        self.ms.append(reply.latency_ms)


@dataclass
class Both:
    """A phase where steps and prefills overlap."""

    steps: Steps
    prefill_ms: list[float] = field(default_factory=list)
    wall_s: float = 0.0


async def alone(endpoint: Endpoint, model: str, count: int) -> Steps:
    """Phase 1."""
    steps = Steps(endpoint, model, "alone")
    await steps.warm()
    for _ in range(count):
        await steps.step()
        await asyncio.sleep(PAUSE_S)
    return steps


async def prefill(endpoint: Endpoint, model: str, name: str, tokens: int) -> float:
    """Prefill a new prompt; milliseconds to its first token."""
    reply = await complete(endpoint, model, Filler().tokens(name, [0], tokens, "", 0), 1)
    return reply.ttft_ms or reply.latency_ms


async def both(
    endpoint: Endpoint, model: str, name: str, *, tokens: int, pause_s: float, least_steps: int = 1, most: int = 1
) -> Both:
    """Phases 3 and 4: steps beside prefills, one after another, until there are `least_steps` or `most` prefills."""
    phase = Both(Steps(endpoint, model, f"{name} steps"))
    await phase.steps.warm()
    while len(phase.prefill_ms) < most and (not phase.prefill_ms or len(phase.steps.ms) < least_steps):
        began = time.perf_counter()
        running = asyncio.create_task(prefill(endpoint, model, f"{name} {len(phase.prefill_ms)}", tokens))
        await asyncio.sleep(0.25)  # let the prefill begin: this is about steps that meet it
        while not running.done():
            await phase.steps.step()
            await asyncio.wait([running], timeout=pause_s)
        phase.prefill_ms.append(await running)
        phase.wall_s += time.perf_counter() - began
    return phase


async def measure(endpoint: Endpoint, model: str, count: int, prefills: int) -> dict[str, Any]:
    """All phases on one server, shown as they end."""
    first = await alone(endpoint, model, count)
    p95_alone, mean_s = percentile(first.ms, 95), sum(first.ms) / len(first.ms) / 1e3
    say(f"steps alone          {spread(first.ms)}")
    prefill_s = await prefill(endpoint, model, "prefill alone", PREFILL_TOKENS) / 1e3
    say(f"prefill alone        {prefill_s:.1f} s")
    apart = await both(
        endpoint, model, "apart", tokens=PREFILL_TOKENS, pause_s=PAUSE_S, least_steps=count, most=prefills
    )
    p95, steps = percentile(apart.steps.ms, 95), len(apart.steps.ms)
    wall_ratio = apart.wall_s / (len(apart.prefill_ms) * prefill_s + steps * mean_s)
    say(f"steps beside         {spread(apart.steps.ms)}, during {len(apart.prefill_ms)} prefills")
    say(f"p95 beside / alone   {p95 / p95_alone:.2f}")
    say(f"wall / ideal         {wall_ratio:.2f} ({apart.wall_s:.1f} s)")
    short_s = await prefill(endpoint, model, "short prefill alone", PACKED_TOKENS) / 1e3
    packed = await both(endpoint, model, "packed", tokens=PACKED_TOKENS, pause_s=0.0)
    beside_s = packed.prefill_ms[0] / 1e3
    say(f"back to back         {spread(packed.steps.ms)}")
    say(f"  its prefill        {beside_s:.1f} s, alone {short_s:.1f} s: it kept {short_s / beside_s:.0%} of its speed")
    return {
        "step_alone_ms": first.ms,
        "prefill_alone_s": prefill_s,
        "step_beside_ms": apart.steps.ms,
        "prefills_beside_s": [ms / 1e3 for ms in apart.prefill_ms],
        "p95_ratio": p95 / p95_alone,
        "wall_s": apart.wall_s,
        "wall_ratio": wall_ratio,
        "back_to_back": {"step_ms": packed.steps.ms, "prefill_s": beside_s, "prefill_share": short_s / beside_s},
    }


def spread(ms: Sequence[float]) -> str:
    """Latencies for people."""
    return f"p50 {percentile(ms, 50):.0f} ms, p95 {percentile(ms, 95):.0f} ms ({len(ms)})"


def main() -> None:
    """Measure ours, then the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    servers.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=40, help="least number of steps a phase (default: %(default)s)")
    parser.add_argument("--baseline-prefills", type=int, default=2, help="prefills of phase 3 (default: %(default)s)")
    parser.add_argument("--only", choices=["trunkline", "llama-server", "vllm"], help="measure one side")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), **servers.describe(args)}
    for side in servers.sides(args, slots=SLOTS, ctx=CTX, host_mib=HOST_MIB):
        if args.only not in (None, side.name):
            continue
        say(f"--- {side.name}")
        prefills = args.baseline_prefills if side.name == "llama-server" else MOST_PREFILLS
        with side.start() as url:
            work = functools.partial(measure, count=args.steps, prefills=prefills)
            result[side.name] = with_endpoint(url, work)
    write_json(args.json, result)


if __name__ == "__main__":
    main()
