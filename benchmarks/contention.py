"""Contention: how long agents take when their contexts together exceed what the slots can hold, and when they do not.

Eight agents at once on four slots, the same bytes of KV and of host memory on both sides, then one agent alone. Ours
and llama-server take turns (A B A B), each time on a fresh server. Reported: mean run completion and its ratio.

    python benchmarks/contention.py [--data FOLDER_OF_LMCACHE_SESSIONS] [--json OUT]

Without `--data` the sessions are generated (seeded, agent-like).
"""

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

import servers
from measure import machine, play, say, with_endpoint, write_json
from trunkline.bench.client import Endpoint
from trunkline.bench.fit import fit
from trunkline.bench.replay import History
from trunkline.bench.report import Summary
from trunkline.bench.workload import agent_sessions, cut
from trunkline.wire.lmcache import read_lmcache
from trunkline.wire.traces import Session, read_sessions


def load(url: str, args: argparse.Namespace) -> list[Session]:
    """The sessions of one round: the agents that contend, and behind them the one that is alone."""
    count = args.agents + 1
    if args.data is None:
        return agent_sessions(
            args.seed,
            count,
            turns=args.turns,
            task_tokens=args.task_tokens,
            step_tokens=args.step_tokens,
            output_tokens=args.output,
            gap_ms=args.gap_ms,
        )

    async def choose(endpoint: Endpoint, _: str) -> list[Session]:
        return await fit(endpoint, read_sessions(read_lmcache(args.data)), args.ctx, args.output, at_most=count)

    return [cut(session, args.turns, args.output) for session in with_endpoint(url, choose)]


def round_of(url: str, args: argparse.Namespace) -> dict[str, Summary]:
    """Everything on one fresh server: first the one agent, then the many."""
    *many, one = load(url, args)
    common: dict[str, Any] = {"history": History.LIVE, "gap_cap_ms": 10_000.0, "unknown_gap_ms": args.gap_ms}
    alone, _ = play(url, [one], lanes=1, **common)
    together, _ = play(url, many, lanes=len(many), **common)
    return {"one": alone, "many": together}


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    servers.add_arguments(parser)
    parser.add_argument("--data", type=Path, help="LMCache sessions, a file or a folder")
    parser.add_argument("--rounds", type=int, default=2, help="times to take turns (default: %(default)s)")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--ctx", type=int, default=2048, help="tokens a slot (default: %(default)s)")
    parser.add_argument("--host-mib", type=int, default=64, help="host memory of both (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=6, help="turns an agent (default: %(default)s)")
    parser.add_argument("--task-tokens", type=int, default=900)
    parser.add_argument("--step-tokens", type=int, default=100)
    parser.add_argument("--output", type=int, default=24, help="tokens an answer (default: %(default)s)")
    parser.add_argument("--gap-ms", type=float, default=500.0, help="tool gap (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def show(side: str, load_name: str, summary: Summary) -> None:
    """One measurement as a line for people."""
    done, latency, reuse = summary.completion_s, summary.latency_ms, summary.reuse
    if done is None or latency is None or reuse is None:
        raise RuntimeError(f"{side}: no run was completed with reuse reported: {summary}")
    say(
        f"{side:14} {load_name:5} {done.mean:8.2f} s a run, p95 {done.p95:7.2f} s, wall {summary.wall_s:7.2f} s,"
        f" reuse {reuse:.3f}, step p95 {latency.p95:.0f} ms"
    )


def main() -> None:
    """Run both sides in turn."""
    args = options()
    compared = servers.sides(args, slots=args.slots, ctx=args.ctx, host_mib=args.host_mib)
    result: dict[str, Any] = {"machine": machine(), **servers.describe(args)}
    rows: list[tuple[str, str, Summary]] = []
    for side in compared * args.rounds:
        with side.start() as url:
            for load_name, summary in round_of(url, args).items():
                show(side.name, load_name, summary)
                rows.append((side.name, load_name, summary))
    for load_name in ("many", "one"):
        means: dict[str, float] = {}
        for side in compared:
            found = [row.completion_s for *key, row in rows if key == [side.name, load_name]]
            means[side.name] = mean(spread.mean for spread in found if spread)
        result[f"completion_{load_name}_s"] = means
        say(f"{load_name}: " + ", ".join(f"{name} {value:.2f} s" for name, value in means.items()))
        if len(means) == 2:
            ours, theirs = means.values()
            result[f"ratio_{load_name}"] = ours / theirs
            say(f"{load_name}: ratio {ours / theirs:.2f}")
    result["rows"] = [{"side": side, "load": load_name, **msgspec.to_builtins(row)} for side, load_name, row in rows]
    write_json(args.json, result)


if __name__ == "__main__":
    main()
