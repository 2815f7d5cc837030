"""Writes Weka sessions as harnesses read them: whole `hash_ids` a request, made small enough for a small model.

    python benchmarks/to_weka.py SRC OUT --by 16 --output-by 8 --max-context 8192 --runs 4 [--id ID] [--form requests]

SRC is a file of delta records or of whole sessions, or a folder of them. OUT becomes a folder with one JSON file a
session, as AgentX and aiperf read it (`weka_trace`); with `--form lines` one file of JSON lines, as guidellm does
(`kind=weka`); with `--form requests` one request a line in order of time, as vLLM does (`timed_trace`): all sessions
from time 0, no block id in two of them, no sub-agents. Sizes are divided and block ids kept, so every shared prefix
stays exactly as shared as it was. All else is as recorded.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from trunkline.wire.chats import read_whole
from trunkline.wire.traces import TraceError, read_lines, spread, trace_files

Record = dict[str, Any]
DELTA = ("keep", "add")
APART = 1 << 20
"""More blocks than any session has."""


def sessions(path: Path) -> Iterator[Record]:
    """Sessions of a file or folder, each request with whole `hash_ids`. Raises `TraceError`."""
    for file in trace_files(path, ".json", ".jsonl"):
        for number, session in _records(file):
            try:
                yield session | {"hash_id_scope": "local", "requests": whole(session["requests"])}
            except (KeyError, TypeError) as error:
                raise TraceError(file, number, f"not a Weka session: {error!r}") from error


def _records(file: Path) -> Iterator[tuple[int, Record]]:
    """Sessions with their line numbers: one a line, or the whole file as one object spread over lines."""
    for number, line in read_lines(file):
        try:
            yield number, msgspec.json.decode(line, type=Record)
        except msgspec.MsgspecError as error:
            if number > 1:
                raise TraceError(file, number, f"not a JSON object: {error}") from error
            yield number, read_whole(file, Record, "Weka sessions, neither one a line nor one in all")
            return


def whole(requests: Sequence[Record]) -> list[Record]:
    """A list of requests with the block ids of each spelled out; a sub-agent's start from nothing."""
    ids: list[int] = []
    told: list[Record] = []
    for request in requests:
        if request["type"] == "subagent":
            told.append(request | {"requests": whole(request["requests"])})
            continue
        ids = request["hash_ids"] if "hash_ids" in request else [*ids[: request["keep"]], *spread(request["add"])]
        told.append({key: value for key, value in request.items() if key not in DELTA} | {"hash_ids": ids})
    return told


def shrink(session: Record, by: int, output_by: int) -> Record:
    """The same session in smaller blocks. Raises ValueError where a block cannot be divided so."""
    block: int = session["block_size"]
    if block % by:
        raise ValueError(f"session {session['id']}: blocks of {block} tokens do not divide by {by}")

    def smaller(request: Record) -> Record:
        if request["type"] == "subagent":
            return request | _divided(request, by) | {"requests": [smaller(inner) for inner in request["requests"]]}
        return request | {"in": request["in"] // by, "out": max(1, request["out"] // output_by)}

    return (
        session
        | _divided(session, by)
        | {"block_size": block // by, "requests": list(map(smaller, session["requests"]))}
    )


def flat(sessions: Sequence[Record]) -> list[Record]:
    """The main agents' requests of all sessions by time; block ids of session n are shifted by n * `APART`."""
    rows = [
        request | {"hash_ids": [APART * number + block for block in request["hash_ids"]]}
        for number, session in enumerate(sessions)
        for request in session["requests"]
        if request["type"] != "subagent"
    ]
    return sorted(rows, key=lambda row: float(row["t"]))


def longest(requests: Sequence[Record]) -> int:
    """Tokens of the longest turn, prompt and output, sub-agents included."""
    inner = (
        longest(request["requests"]) if request["type"] == "subagent" else request["in"] + request["out"]
        for request in requests
    )
    return max(inner, default=0)


def _divided(record: Record, by: int) -> Record:
    return {key: record[key] // by for key in ("tool_tokens", "system_tokens") if record.get(key)}


def main(argv: Sequence[str] | None = None) -> None:
    """Convert a file or folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--by", type=int, default=16, help="divide block and input sizes (default: %(default)s)")
    parser.add_argument("--output-by", type=int, default=8, help="divide outputs (default: %(default)s)")
    parser.add_argument(
        "--max-context", type=int, default=8192, help="leave out longer sessions (default: %(default)s)"
    )
    parser.add_argument("--id", action="append", default=[], help="this session; may be repeated")
    parser.add_argument("--runs", type=int, help="at most this many sessions")
    parser.add_argument("--form", choices=["folder", "lines", "requests"], default="folder", help="see above")
    args = parser.parse_args(argv)
    named = (session for session in sessions(args.source) if not args.id or session["id"] in args.id)
    small = (shrink(session, args.by, args.output_by) for session in named)
    kept = list(islice((session for session in small if longest(session["requests"]) <= args.max_context), args.runs))
    if args.form != "folder":
        rows = kept if args.form == "lines" else flat(kept)
        args.out.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        for session in kept:
            (args.out / f"{session['id']}.json").write_bytes(msgspec.json.encode(session))
    print(f"{len(kept)} sessions in {args.out}")


if __name__ == "__main__":
    main()
