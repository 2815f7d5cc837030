"""The `trunkline trace` command: bring traces in, look at them, make them smaller, export what a server recorded."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from trunkline.trace.progress import watched
from trunkline.trace.tables import figures_table
from trunkline.wire.figures import FigureCounter
from trunkline.wire.formats import AUTO, FORMATS, read_trace_sessions
from trunkline.wire.recorded import runs_of_records
from trunkline.wire.records import RunView
from trunkline.wire.reshape import cap_gaps, scale, slice_sessions
from trunkline.wire.traces import RunTrace, Session, TraceError, encode_run, read_sessions, write_runs

STDOUT = Path("-")
ABOUT = "formats:\n" + "\n".join(f"  {name:<10} {known.about}" for name, known in FORMATS.items())
EXAMPLES = """examples:
  trunkline trace stats traces.jsonl.gz                          what is in it: sizes, waits, infinite-cache hit
  trunkline trace import sessions/ --format weka --out runs.jsonl.gz   into the one format that everything reads
  trunkline trace slice runs.jsonl.gz --max-context 131072 --first 50 --out few.jsonl
  trunkline trace scale few.jsonl --by 16 --output-by 8 --gap-cap 2 --out small.jsonl
  trunkline trace export --out mine.jsonl                        what your own server recorded
  trunkline bench --trace small.jsonl                            replay it against a server"""

Records = Callable[[Path | None, int], Iterable[RunView]]
"""Gives what a data directory recorded: at most so many runs, the latest."""


def add_commands(parser: argparse.ArgumentParser, records: Records) -> None:
    """Declare the sub-commands. `records` reads a server's records."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Agent traces of any known format: read, count, cut, shrink, and export your own."
    parser.epilog = f"{EXAMPLES}\n\n{ABOUT}\n\nEvery command reads every format, plain or gzip, a file or a folder."
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=about,
            description=f"{about}.",
            epilog=ABOUT,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=lambda args: _explained(run, args), records=records)
        return added

    for name, run, about in (
        ("import", _import, "Write a trace of any format as run traces"),
        ("stats", _stats, "Show what is in a trace"),
        ("scale", _scale, "Divide sizes and cap waits; what prompts share stays exact"),
        ("slice", _slice, "Keep some of a trace's sessions"),
    ):
        added = command(name, run, about)
        added.add_argument("source", type=Path, metavar="SRC", help="a trace file, or a folder of them")
        added.add_argument(
            "--format", choices=[AUTO, *FORMATS], default=AUTO, help="its format (default: told from its content)"
        )
        if name == "stats":
            added.add_argument("--json", action="store_true", help="print JSON")
        elif name == "scale":
            added.add_argument("--by", type=_positive, default=1, metavar="N", help="divide block and input sizes by N")
            added.add_argument(
                "--output-by", type=_positive, metavar="N", help="divide outputs by N (default: as --by)"
            )
            added.add_argument("--gap-cap", type=float, metavar="S", help="no tool gap longer than S seconds")
        elif name == "slice":
            _add_filters(added)
        if name != "stats":
            _add_out(added)
    export = command("export", _export, "Write what a server recorded as run traces")
    export.add_argument("--data-dir", type=Path, help="where the server keeps its records (default: as `serve`)")
    export.add_argument(
        "--limit", type=_positive, default=10_000, help="at most so many runs, the latest (%(default)s)"
    )
    _add_out(export)


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=_positive, metavar="N", help="at most N sessions")
    parser.add_argument("--id", action="append", default=[], help="this session (its first run's id); may be repeated")
    parser.add_argument(
        "--from", type=float, dest="begin", metavar="S", help="begun at S seconds of the trace or later"
    )
    parser.add_argument("--until", type=float, dest="end", metavar="S", help="begun earlier than that")
    parser.add_argument("--max-context", type=_positive, metavar="N", help="no turn over N tokens, prompt and output")


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=STDOUT, metavar="FILE", help="write here; `.gz` compresses (default: print)"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _explained(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """What cannot be done with a trace is told with its name."""
    try:
        return run(args)
    except (TraceError, BrokenPipeError):  # a reader that has seen enough (`| head`) is no error of the trace's
        raise
    except (ValueError, OSError) as error:
        raise TraceError(args.source if "source" in args else args.out, None, str(error)) from error


def _import(args: argparse.Namespace) -> int:
    return _write(args.out, _sessions(args))


def _stats(args: argparse.Namespace) -> int:
    counter = FigureCounter()
    for session in _sessions(args):
        counter.add(session)
    figures = counter.figures()
    print(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() if args.json else figures_table(figures))
    return 0


def _scale(args: argparse.Namespace) -> int:
    def smaller(run: RunTrace) -> RunTrace:
        if args.by != 1 or args.output_by:
            run = scale(run, args.by, args.output_by)
        return run if args.gap_cap is None else cap_gaps(run, args.gap_cap * 1e3)

    return _write(args.out, (tuple(map(smaller, session)) for session in _sessions(args)))


def _slice(args: argparse.Namespace) -> int:
    between_ms = None
    if args.begin is not None or args.end is not None:
        end_s = float("inf") if args.end is None else args.end
        between_ms = (args.begin or 0.0) * 1e3, end_s * 1e3
    kept = slice_sessions(
        _sessions(args), first=args.first, ids=args.id, between_ms=between_ms, max_context=args.max_context
    )
    return _write(args.out, kept)


def _export(args: argparse.Namespace) -> int:
    return _write(args.out, watched(read_sessions(runs_of_records(args.records(args.data_dir, args.limit)))))


def _sessions(args: argparse.Namespace) -> Iterator[Session]:
    return watched(read_trace_sessions(args.source, args.format))


def _write(out: Path, sessions: Iterable[Session]) -> int:
    """Write sessions and say how many. Fails if there are none."""
    count = turns = 0

    def runs() -> Iterator[RunTrace]:
        nonlocal count, turns
        for session in sessions:
            count += 1
            for run in session:
                turns += len(run.turns)
                yield run
        if not count:
            raise TraceError(out, None, "not written: no session is left")

    if out == STDOUT:
        written = sum(1 for run in runs() if sys.stdout.buffer.write(encode_run(run)))
        sys.stdout.buffer.flush()
    else:
        written = write_runs(out, runs())
    where = "" if out == STDOUT else f" to {out}"
    print(f"trunkline: wrote {count:,} sessions, {written:,} runs, {turns:,} turns{where}", file=sys.stderr)
    return 0
