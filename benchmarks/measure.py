"""What the benchmarks share: replaying sessions, single timed requests, results with the machine they came from."""

import asyncio
import os
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from trunkline.bench.client import Endpoint, Reply
from trunkline.bench.command import Progress
from trunkline.bench.events import Event
from trunkline.bench.replay import History, Replay, ReplaySettings
from trunkline.bench.report import Summary, summarize
from trunkline.bench.reuse import count_reusable
from trunkline.wire.traces import Session

T = TypeVar("T")


def with_endpoint(url: str, work: Callable[[Endpoint, str], Awaitable[T]]) -> T:
    """Run `work(endpoint, model name)` in an event loop of its own."""

    async def run() -> T:
        async with Endpoint(url, timeout_s=1200) as endpoint:
            return await work(endpoint, (await endpoint.model())[0])

    return asyncio.run(run())


def play(url: str, sessions: Sequence[Session], **settings: Any) -> tuple[Summary, list[Event]]:
    """Replay sessions against `url` and count what was reusable."""

    async def work(endpoint: Endpoint, model: str) -> tuple[Summary, list[Event]]:
        replay = Replay(endpoint, ReplaySettings(model=model, **settings))
        progress = Progress(sum(len(run.turns) for session in sessions for run in session))
        await replay.play(sessions, progress.turn)
        progress.end()
        await count_reusable(endpoint, replay.sent, replay.settings.history is History.LIVE)
        events: list[Event] = [*(sent.event for sent in replay.sent), *replay.runs]
        return summarize(events), events

    return with_endpoint(url, work)


async def complete(endpoint: Endpoint, model: str, prompt: Sequence[int], max_tokens: int) -> Reply:
    """One greedy completion of token ids, of exactly `max_tokens`. Raises RuntimeError if it fails."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = await endpoint.generate("/v1/completions", body)
    if reply.error is not None:
        raise RuntimeError(reply.error)
    return reply


def percentile(values: Sequence[float], share: float) -> float:
    """A percentile, `share` in percent."""
    return float(np.percentile(np.asarray(values), share))


def say(text: str) -> None:
    """A line for people, at once."""
    print(text, flush=True)


def machine() -> dict[str, Any]:
    """Where and when this was measured."""
    model = next((line for line in _cpuinfo() if line.startswith("model name")), "model name: unknown")
    load = Path("/proc/loadavg")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model.split(":")[1].strip(),
        "cpus": len(_affinity()),
        "python": platform.python_version(),
        "load_before": load.read_text().split()[0] if load.exists() else None,
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": _commit(),
    }


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result, if a path was given."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _affinity() -> set[int]:
    return os.sched_getaffinity(0)


def _commit() -> str:
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"
