"""Reads arrival traces: Mooncake's (512-token block ids, shared by all requests) and Azure's (lengths alone).

Every request is a run of one turn that begins at its recorded time: neither trace says which requests belong together.
"""

import csv
import io
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from trunkline.wire.chats import stem
from trunkline.wire.traces import (
    MAX_ID,
    BlocksPrompt,
    RunTrace,
    TraceError,
    TurnTrace,
    id_runs,
    read_lines,
    trace_files,
)

MOONCAKE_BLOCK = 512
AZURE_BLOCK = 64
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class _Request(msgspec.Struct):
    """One request. `timestamp` is milliseconds; the last id may be of a block that is not full."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=MAX_ID)]]


_decode = msgspec.json.Decoder(_Request).decode


def read_mooncake(path: Path) -> Iterator[RunTrace]:
    """Requests of a file, or of every JSON-lines file in a folder; each file is an id space. Raises `TraceError`."""
    for file in trace_files(path, ".jsonl"):
        for number, line in read_lines(file):
            try:
                request = _decode(line)
            except msgspec.MsgspecError as error:
                raise TraceError(file, number, f"not a Mooncake request: {error}") from error
            whole, tail = divmod(request.input_length, MOONCAKE_BLOCK)
            if len(request.hash_ids) != whole + (tail > 0):
                raise TraceError(
                    file, number, f"{len(request.hash_ids)} ids for {request.input_length} tokens in blocks of 512"
                )
            prompt = BlocksPrompt(
                add=tuple(id_runs(request.hash_ids[:whole])),
                tail_tokens=tail,
                tail_id=request.hash_ids[-1] if tail else None,
            )
            yield _run(file, number, prompt, request.output_length, request.timestamp, MOONCAKE_BLOCK, stem(file))


def read_azure(path: Path) -> Iterator[RunTrace]:
    """Requests of an Azure LLM inference trace (CSV). Nothing is shared. Raises `TraceError`."""
    for file in trace_files(path, ".csv"):
        began: datetime | None = None
        for number, line in read_lines(file):
            if number == 1:
                if line.decode("utf-8-sig", "replace") != AZURE_HEADER:
                    raise TraceError(file, 1, f"not an Azure trace: its first line should be {AZURE_HEADER}")
                continue
            try:
                ((at_text, context, generated),) = csv.reader(io.StringIO(line.decode()))
                at, prompt_tokens, output_tokens = datetime.fromisoformat(at_text), int(context), int(generated)
            except ValueError as error:
                raise TraceError(file, number, f"not an Azure request: {error}") from error
            began = began or at
            begin_ms = (at - began).total_seconds() * 1e3
            prompt = BlocksPrompt(tail_tokens=prompt_tokens)
            yield _run(file, number, prompt, output_tokens, begin_ms, AZURE_BLOCK, "")


def _run(
    file: Path, number: int, prompt: BlocksPrompt, output: int, begin_ms: float, block: int, space: str
) -> RunTrace:
    turn = TurnTrace(prompt=prompt, output_tokens=output, at_ms=0.0)
    return RunTrace(
        id=f"{stem(file)}/{number}",
        kind="request",
        source="mooncake" if space else "azure",
        turns=(turn,),
        begin_ms=begin_ms,
        block_tokens=block,
        space=space,
    )
