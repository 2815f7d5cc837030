"""What the gateway adds to a request, without an engine.

A scripted executor emits tokens on a schedule that is fixed when a turn is accepted; a real uvicorn server in a process
of its own serves the real gateway in front of it; this process reads N concurrent SSE streams over loopback. Both share
the machine's monotonic clock, and every token's text says when it was due and when its turn was accepted, so

    request overhead = (turn accepted - first byte written) + (last byte read - last token due)
    token overhead   = token read - token due

contain everything between client and executor: parsing, run records, SSE, the event loop, sockets, and this client.

    python benchmarks/gateway_overhead.py [--streams 50] [--rounds 8] [--json OUT]

Three ways to load it: `staggered` (streams begin spread over one request's duration, each on its own clock),
`lockstep` (so too, but all tokens of all streams fall due together, as when an engine steps a whole batch) and `burst`
(all streams send their requests at the same moment, again and again).
"""

import argparse
import asyncio
import heapq
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from trunkline.core.types import EndReason, Ints, RunKey
from trunkline.gateway.app import build_app
from trunkline.gateway.executor import ModelInfo
from trunkline.gateway.records import RunRecords
from trunkline.gateway.settings import GatewaySettings
from trunkline.wire.records import MissRow, TurnRow
from trunkline.wire.turns import (
    Accepted,
    Admitted,
    Constraint,
    Delta,
    Ended,
    Failed,
    Placed,
    RunHint,
    RunPlan,
    TurnEvent,
    TurnRequest,
)

FIRST_MS = 50.0
INTERVAL_MS = 20.0
MARK = b'"content":"t'
SCHEDULES = ("staggered", "lockstep", "burst")


Queue = asyncio.Queue[tuple[int, int]]
"""(when a token was due, how many follow)."""


# --- the server's side -------------------------------------------------------------------------------------------


@dataclass(order=True)
class _Due:
    """One token that falls due."""

    at_ns: int
    seq: int
    left: int = field(compare=False)
    loop: asyncio.AbstractEventLoop = field(compare=False)
    queue: Queue = field(compare=False)


def _deliver(batch: Sequence[_Due]) -> None:
    for due in batch:
        due.queue.put_nowait((due.at_ns, due.left))


class ScriptedExecutor:
    """Emits each turn's tokens on its schedule from a thread of its own, as an engine would."""

    def __init__(self, records: RunRecords, schedule: str) -> None:
        self._records = records
        self._lockstep = schedule == "lockstep"
        self._due: list[_Due] = []
        self._seq = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._emit, daemon=True).start()

    @property
    def model(self) -> ModelInfo:
        """One token a byte."""
        return ModelInfo(id="scripted", max_model_len=1 << 20, created=0, vocab_size=256)

    def ready(self) -> str | None:
        """Always."""
        return None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Join the messages."""
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def tokenize(self, text: str, *, salt: str, bos: bool = True) -> Ints:
        """Bytes as tokens."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Tokens as bytes."""
        return bytes(tokens).decode(errors="replace")

    def check_constraint(self, constraint: Constraint) -> None:
        """Everything compiles."""

    async def generate(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """Accept, emit `max_tokens` tokens when they fall due, hand over the record, end."""
        run = request.hint.run or "inferred"
        queue: Queue = asyncio.Queue()
        accepted_ns = self._schedule(request.max_tokens, queue)
        yield Accepted(run=run, index=0, parent=None)
        yield Placed(0)
        left = 1
        while left:
            due_ns, left = await queue.get()
            yield Delta((0,), f"t{due_ns},{accepted_ns}")
        row = _row(len(request.tokens), request.max_tokens)
        self._records.turn(request.salt, run, None, request.hint.origin, row)
        yield Ended(EndReason.LENGTH, row)

    def _schedule(self, tokens: int, queue: Queue) -> int:
        accepted_ns = time.monotonic_ns()
        at_ns = accepted_ns + int(FIRST_MS * 1e6)
        if self._lockstep:
            grid = int(INTERVAL_MS * 1e6)
            at_ns += -at_ns % grid
        with self._changed:
            self._seq += 1
            loop = asyncio.get_running_loop()
            heapq.heappush(self._due, _Due(at_ns, self._seq, tokens - 1, loop, queue))
            self._changed.notify()
        return accepted_ns

    def _emit(self) -> None:
        """Hand over all tokens that are due with one wake-up of the loop, as an engine does after a step."""
        while True:
            with self._changed:
                while not self._due:
                    self._changed.wait()
                wait_s = (self._due[0].at_ns - time.monotonic_ns()) / 1e9
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                now_ns = time.monotonic_ns()
                batch = []
                while self._due and self._due[0].at_ns <= now_ns:
                    due = heapq.heappop(self._due)
                    batch.append(due)
                    if due.left:
                        next_ns = due.at_ns + int(INTERVAL_MS * 1e6)
                        heapq.heappush(self._due, replace(due, at_ns=next_ns, left=due.left - 1))
            batch[0].loop.call_soon_threadsafe(_deliver, batch)

    def turned_away(self, salt: str, hint: RunHint, kind: str) -> Failed | None:
        """Nobody is."""
        return None

    async def declare_run(self, key: RunKey, plan: RunPlan) -> Admitted | Failed:
        """Everybody is let in."""
        return Admitted()

    def finish_run(self, key: RunKey) -> None:
        """Nothing to note."""

    def reset_prefix_cache(self) -> None:
        """Nothing to forget."""

    def gauges(self) -> Mapping[str, float]:
        """Nothing to report."""
        return {}


def _row(prompt: int, completion: int) -> TurnRow:
    return TurnRow(
        index=0,
        at=time.time(),
        node="scripted",
        prompt_tokens=prompt,
        cached_tokens=0,
        novel_tokens=prompt,
        reusable_tokens=0,
        completion_tokens=completion,
        misses=(MissRow(reason="never_seen", tokens=prompt),),
        queue_ms=0,
        prefill_ms=0,
        decode_ms=0,
        latency_ms=0,
        tool_gap_ms=None,
        finish_reason="length",
    )


def serve(schedule: str) -> None:
    """Serve on a free port, which is printed, until killed."""
    with tempfile.TemporaryDirectory() as folder:
        records = RunRecords(Path(folder) / "runs.sqlite")
        executor = ScriptedExecutor(records, schedule)
        app = build_app(executor, records, GatewaySettings())
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))

        async def run() -> None:
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            print(server.servers[0].sockets[0].getsockname()[1], flush=True)
            await serving

        asyncio.run(run())


# --- the client's side -------------------------------------------------------------------------------------------


@dataclass
class Samples:
    """Overheads in milliseconds."""

    request_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)


def request_bytes(stream: int, tokens: int, body_chars: int) -> bytes:
    """One HTTP request with a history of about `body_chars` characters."""
    body = json.dumps(
        {
            "model": "scripted",
            "messages": [
                {"role": "system", "content": "You are a careful agent. " * (body_chars // 50)},
                {"role": "user", "content": "Read the next file, please. " * (body_chars // 56)},
            ],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"X-Trunkline-Run: stream-{stream}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def one_stream(port: int, begin_s: float, rounds: int, request: bytes, tokens: int) -> Samples:
    """`rounds` requests on one connection, the first after `begin_s`."""
    samples = Samples()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.sleep(begin_s)
    for _ in range(rounds):
        began_ns = time.monotonic_ns()
        writer.write(request)
        due_ns = accepted_ns = seen = 0
        while (line := await reader.readline()) != b"0\r\n":
            now_ns = time.monotonic_ns()
            assert line, "the server closed the connection"
            at = line.find(MARK)
            if at >= 0:
                stamps = line[at + len(MARK) : line.index(b'"', at + len(MARK))]
                due_ns, accepted_ns = map(int, stamps.split(b","))
                samples.token_ms.append((now_ns - due_ns) / 1e6)
                seen += 1
        await reader.readline()
        assert seen == tokens, f"{seen} of {tokens} tokens arrived"
        added_ns = (accepted_ns - began_ns) + (time.monotonic_ns() - due_ns)
        samples.request_ms.append(added_ns / 1e6)
        await asyncio.sleep(0.01)
    writer.close()
    await writer.wait_closed()
    return samples


async def measure(port: int, schedule: str, options: argparse.Namespace) -> Samples:
    """All streams at once. The first round, which warms the server up, is thrown away."""
    streams, tokens = options.streams, options.tokens
    spread_s = 0.0 if schedule == "burst" else (FIRST_MS + INTERVAL_MS * tokens) / 1000

    async def all_streams(rounds: int) -> list[Samples]:
        requests = [request_bytes(at, tokens, options.body_chars) for at in range(streams)]
        return await asyncio.gather(
            *(one_stream(port, spread_s * at / streams, rounds, request, tokens) for at, request in enumerate(requests))
        )

    await all_streams(1)
    total = Samples()
    for samples in await all_streams(options.rounds):
        total.request_ms += samples.request_ms
        total.token_ms += samples.token_ms
    return total


def summary(values: Sequence[float]) -> dict[str, float]:
    """Percentiles of milliseconds."""
    return {f"p{at}": round(float(np.percentile(values, at)), 3) for at in (50, 95, 99)} | {"n": len(values)}


def run(schedule: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure one schedule against a server of its own."""
    command = [sys.executable, __file__, "--serve", schedule]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            samples = asyncio.run(measure(port, schedule, options))
        finally:
            server.terminate()
    return {"request_ms": summary(samples.request_ms), "token_ms": summary(samples.token_ms)}


def main() -> None:
    """Measure both schedules; print a table and, if asked, write JSON."""
    parser = argparse.ArgumentParser(description="What the gateway adds to a request, without an engine.")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=30)
    parser.add_argument("--body-chars", type=int, default=3000)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--serve", choices=SCHEDULES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    figures: dict[str, Any] = {
        "streams": options.streams,
        "tokens": options.tokens,
        "interval_ms": INTERVAL_MS,
        "python": platform.python_version(),
        "schedules": {schedule: run(schedule, options) for schedule in SCHEDULES},
    }
    print(f"{options.streams} streams, {options.tokens} tokens each, one per {INTERVAL_MS:g} ms and stream; ms added")
    print(f"{'schedule':<12}{'per':<10}{'p50':>8}{'p95':>8}{'p99':>8}{'samples':>10}")
    for schedule, kinds in figures["schedules"].items():
        for kind, at in kinds.items():
            print(f"{schedule:<12}{kind[:-3]:<10}{at['p50']:>8.2f}{at['p95']:>8.2f}{at['p99']:>8.2f}{at['n']:>10}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
