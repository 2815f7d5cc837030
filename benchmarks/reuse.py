"""Reuse: concurrent agent runs on ours, on llama-server, and on ours with sharing switched off.

Reuse is cached / reusable prompt tokens from turn 2 on. Reusable is counted by the driver: the longest prefix that
arrived earlier, answers included. The model's own answers become history, so a server that re-tokenizes them
differently loses the prefix.

    python benchmarks/reuse.py [--data FOLDER_OF_LMCACHE_SESSIONS] [--json OUT]

Without `--data` the sessions are generated (seeded, agent-like). With sharing off only two turns a run are played:
every prompt is computed whole, and the figure must collapse.
"""

import argparse
from pathlib import Path
from typing import Any

import msgspec

import servers
from measure import machine, play, say, with_endpoint, write_json
from trunkline.bench.client import Endpoint
from trunkline.bench.fit import fit
from trunkline.bench.replay import History
from trunkline.bench.report import show
from trunkline.bench.workload import agent_sessions, cut
from trunkline.wire.lmcache import read_lmcache
from trunkline.wire.traces import Session, read_sessions

RUNS, SLOTS, CTX, HOST_MIB = 4, 4, 8192, 512


def load(url: str, data: Path | None, turns: int, output: int) -> list[Session]:
    """The first sessions that fit the context, whole; then cut to `turns` turns and `output` tokens."""
    if data is None:
        return agent_sessions(1, RUNS, turns=turns, task_tokens=1500, step_tokens=250, output_tokens=output, gap_ms=300)

    async def choose(endpoint: Endpoint, _: str) -> list[Session]:
        return await fit(endpoint, read_sessions(read_lmcache(data)), CTX, output, at_most=RUNS)

    return [cut(session, turns, output) for session in with_endpoint(url, choose)]


def main() -> None:
    """Run ours, the baseline, and ours without sharing, each on a fresh server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    servers.add_arguments(parser)
    parser.add_argument("--data", type=Path, help="LMCache sessions, a file or a folder")
    parser.add_argument("--turns", type=int, default=8, help="turns a run (default: %(default)s)")
    parser.add_argument("--output", type=int, default=48, help="longest answer in tokens (default: %(default)s)")
    args = parser.parse_args()
    size: dict[str, int] = {"slots": SLOTS, "ctx": CTX, "host_mib": HOST_MIB}
    result: dict[str, Any] = {"machine": machine(), **servers.describe(args)}
    off = servers.sharing_off(args, **size)
    for side in [*servers.sides(args, **size), off]:
        with side.start() as url:
            sessions = load(url, args.data, 2 if side is off else args.turns, args.output)
            summary, _ = play(url, sessions, lanes=RUNS, history=History.LIVE)
        say(f"--- {side.name}: {', '.join(session[0].id[:12] for session in sessions)}\n{show(summary)}")
        result[side.name] = msgspec.to_builtins(summary)
    write_json(args.json, result)


if __name__ == "__main__":
    main()
