"""Writes chat traces as abench sessions (PyPI `agentic-bench`, one JSON line a session), for `lmcache/miniswe`.

    python benchmarks/to_abench.py FOLDER_OR_FILE OUT.jsonl --tokenizer FOLDER [--max-context 8192] [--runs N]

abench takes prompt and output lengths from the file, so they are counted here with the served model's tokenizer (a
Hugging Face folder; benchmarks/to_tokenizer.py makes one). Needs `transformers` and nothing of abench.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from trunkline.wire.lmcache import read_lmcache
from trunkline.wire.traces import Message, RunTrace, expand


def convert(run: RunTrace, tokenizer: Any) -> dict[str, Any]:
    """One run as a session. Only runs whose history grows and is never edited can be told in this format.

    A turn's delta is what came since the previous answer; the answers themselves are abench's `assistant_text`.
    """
    turns: list[dict[str, Any]] = []
    history: list[dict[str, str]] = []
    for index, (turn, symbols) in enumerate(zip(run.turns, expand(run), strict=True)):
        messages = [_plain(symbol) for symbol in symbols if isinstance(symbol, Message)]
        if messages[: len(history)] != history:
            raise ValueError(f"run {run.id}: turn {index} edits its history, which abench's format cannot say")
        answer = turn.output or ""
        turns.append(
            {
                "index": index,
                "input_delta": messages[len(history) :],
                "assistant_text": answer,
                "input_tokens": len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]),
                "output_tokens": len(tokenizer.encode(answer)),
                "cached_tokens": 0,
                "pre_gap_ms": turn.gap_ms or 0.0,
            }
        )
        history = [*messages, {"role": "assistant", "content": answer}]
    source = {"dataset": "lmcache", "agent": run.kind, "model": "recorded", "trial": 0}
    return {"session_id": run.id, "source": source, "system_prompt": "", "turns": turns}


def fitting(sessions: Iterator[dict[str, Any]], max_context: int) -> Iterator[dict[str, Any]]:
    """Sessions whose longest turn fits."""
    for session in sessions:
        if max(turn["input_tokens"] + turn["output_tokens"] for turn in session["turns"]) <= max_context:
            yield session


def _plain(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def main(argv: Sequence[str] | None = None) -> None:
    """Convert a file or folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--max-context", type=int, default=8192, help="leave out longer sessions")
    parser.add_argument("--runs", type=int, help="at most this many")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    converted = (convert(run, tokenizer) for run in read_lmcache(args.trace))
    sessions = list(islice(fitting(converted, args.max_context), args.runs))
    args.out.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    print(f"{len(sessions)} sessions, {sum(len(session['turns']) for session in sessions)} turns in {args.out}")


if __name__ == "__main__":
    main()
