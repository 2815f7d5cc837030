"""Forks: eight branches from one prefix of 2,000 tokens.

Warm: the prefix arrived with an earlier turn; then eight branches arrive at once, each with eight tokens of its own.
The last branch's first token is compared with prefilling the prefix. Cold: the eight arrive at once and nobody was
there before; the prefix should still be computed once. Ours and llama-server take turns (A B A B), then ours with
sharing off.

    python benchmarks/forks.py [--rounds 2] [--json OUT]
"""

import argparse
import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import servers
from measure import complete, machine, say, with_endpoint, write_json
from trunkline.bench.client import Endpoint
from trunkline.bench.filler import Filler

BRANCHES, PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 8, 2000, 8, 16
SLOTS, CTX, HOST_MIB = BRANCHES, 4096, 512


async def measure(endpoint: Endpoint, model: str, phases: Sequence[str]) -> dict[str, float]:
    """One server's figures. Times in ms; novel tokens are prompt less cached, summed over the branches."""
    filler = Filler()
    await complete(endpoint, model, filler.tokens("warm up", [0], 64, "", 0), 2)
    prefill = await complete(endpoint, model, filler.tokens("forks", [0], PREFIX_TOKENS, "", 0), 1)
    figures = {"prefill_ms": prefill.ttft_ms or prefill.latency_ms}
    for block, name in enumerate(phases):  # block 0 is the prefix just prefilled; nobody has sent block 1 before
        prompts = [filler.tokens("forks", [block], PREFIX_TOKENS, f"{n}", OWN_TOKENS) for n in range(BRANCHES)]
        replies = await asyncio.gather(*(complete(endpoint, model, prompt, OUTPUT_TOKENS) for prompt in prompts))
        figures[f"{name}_last_first_token_ms"] = max(reply.ttft_ms or reply.latency_ms for reply in replies)
        figures[f"{name}_novel_tokens"] = sum(reply.prompt_tokens - (reply.cached_tokens or 0) for reply in replies)
    figures["warm_over_prefill"] = figures["warm_last_first_token_ms"] / figures["prefill_ms"]
    return figures


def main() -> None:
    """Run every side, `--rounds` times in turn, each on a fresh server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    servers.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=2, help="times to take turns (default: %(default)s)")
    args = parser.parse_args()
    size: dict[str, int] = {"slots": SLOTS, "ctx": CTX, "host_mib": HOST_MIB}
    rows: list[dict[str, Any]] = []
    say(f"{'':14} {'prefill':>10} {'last first token':>18} {'of prefill':>11} {'novel warm':>11} {'novel cold':>11}")
    off = servers.sharing_off(args, **size)
    for side in [*servers.sides(args, **size) * args.rounds, off]:
        phases = ("warm",) if side is off else ("warm", "cold")
        with side.start() as url:
            figures = with_endpoint(url, functools.partial(measure, phases=phases))
        rows.append({"side": side.name, **figures})
        novel = " ".join(f"{figures[f'{name}_novel_tokens']:11.0f}" for name in phases)
        last, share = figures["warm_last_first_token_ms"], figures["warm_over_prefill"]
        say(f"{side.name:14} {figures['prefill_ms']:7.0f} ms {last:15.0f} ms {share:11.3f} {novel}")
    write_json(args.json, {"machine": machine(), **servers.describe(args), "rows": rows})


if __name__ == "__main__":
    main()
