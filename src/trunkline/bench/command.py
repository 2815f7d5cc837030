"""The bench command: replay a trace file against a server and report."""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from trunkline.bench.client import Endpoint, EndpointError
from trunkline.bench.events import Event, TurnEvent, write_events
from trunkline.bench.filler import Filler
from trunkline.bench.fit import fit
from trunkline.bench.replay import DEFAULT_OUTPUT_TOKENS, Form, History, Replay, ReplaySettings
from trunkline.bench.report import Summary, show, summarize
from trunkline.bench.reuse import count_reusable
from trunkline.wire.formats import AUTO, FORMATS, read_trace_sessions
from trunkline.wire.reshape import scale
from trunkline.wire.traces import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server address (default: %(default)s)")
    parser.add_argument("--trace", type=Path, required=True, help="trace file, or a folder of them")
    parser.add_argument(
        "--format", choices=[AUTO, *FORMATS], default=AUTO, help="trace format (default: told by content)"
    )
    parser.add_argument("--scale", type=int, default=1, help="divide block, input and output sizes by this")
    parser.add_argument("--scale-output", type=int, help="divide outputs by this instead")
    parser.add_argument("--runs", type=int, help="replay at most this many sessions")
    parser.add_argument("--lanes", type=int, default=4, help="sessions open at once (default: %(default)s)")
    parser.add_argument("--max-context", type=int, help="leave out sessions with a longer turn (default: the server's)")
    parser.add_argument("--form", choices=list(Form), default=Form.TOKENS, help="how block prompts are sent")
    parser.add_argument("--history", choices=list(History), default=History.RECORDED, help="whose answers are history")
    parser.add_argument("--session-header", help="header that carries the run's id (default: none is sent)")
    parser.add_argument("--gap-scale", type=float, default=1.0, help="multiply tool gaps (default: %(default)s)")
    parser.add_argument("--gap-cap", type=float, default=2.0, help="longest tool gap, s (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the filler (default: %(default)s)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--model", help="model name (default: the first served)")
    parser.add_argument("--json", type=Path, help="write the summary here")
    parser.add_argument("--events", type=Path, help="write one JSON line a turn and a run here")


def run(args: argparse.Namespace) -> int:
    """Replay, print the summary, write what was asked for. Returns the exit code: 1 if a run failed or none could."""
    try:
        summary, events = asyncio.run(replay(args))
    except (EndpointError, ValueError) as error:
        print(f"trunkline bench: {error}", file=sys.stderr)
        return 1
    print(show(summary))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    if args.events:
        write_events(args.events, events)
    return 1 if summary.failed_runs else 0


async def replay(args: argparse.Namespace) -> tuple[Summary, list[Event]]:
    """Read, fit, play and count. Raises `EndpointError` and `TraceError`."""
    async with Endpoint(args.url, api_key=args.api_key) as endpoint:
        model, context = await endpoint.model()
        limit = args.max_context or context or sys.maxsize
        sessions = await fit(endpoint, _sessions(args), limit, DEFAULT_OUTPUT_TOKENS, args.runs)
        if not sessions:
            raise EndpointError(f"no session of {args.trace} fits {limit} tokens; use --scale or a larger context")
        settings = ReplaySettings(
            model=args.model or model,
            lanes=args.lanes,
            form=Form(args.form),
            history=History(args.history),
            session_header=args.session_header,
            gap_scale=args.gap_scale,
            gap_cap_ms=args.gap_cap * 1e3,
        )
        played = Replay(endpoint, settings, Filler(args.seed))
        progress = Progress(sum(len(run.turns) for session in sessions for run in session))
        await played.play(sessions, progress.turn)
        progress.end()
        await count_reusable(endpoint, played.sent, settings.history is History.LIVE)
        events: list[Event] = [*(sent.event for sent in played.sent), *played.runs]
        return summarize(events), events


def _sessions(args: argparse.Namespace) -> Iterator[Session]:
    for session in read_trace_sessions(args.trace, args.format):
        if args.scale != 1 or args.scale_output:
            yield tuple(scale(run, args.scale, args.scale_output) for run in session)
        else:
            yield session


class Progress:
    """A progress line on stderr, at most one every two seconds."""

    def __init__(self, turns: int) -> None:
        self.turns, self.done, self.failed = turns, 0, 0
        self.began = self.shown = time.monotonic()

    def turn(self, event: TurnEvent) -> None:
        """Count one more turn, and show the count if it is time."""
        self.done += 1
        self.failed += event.error is not None
        if time.monotonic() - self.shown >= 2:
            self.shown = time.monotonic()
            failed = f", {self.failed} failed" if self.failed else ""
            print(
                f"\r{self.done}/{self.turns} turns, {self.shown - self.began:.0f} s{failed} ", end="", file=sys.stderr
            )

    def end(self) -> None:
        """Finish the line, if one was begun."""
        if self.shown != self.began:
            print(file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command by itself: `python -m trunkline.bench`."""
    parser = argparse.ArgumentParser(prog="trunkline bench", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    with suppress(KeyboardInterrupt):
        return run(args)
    return 130
