"""Makes a local Hugging Face tokenizer folder from a GGUF file, for harnesses that count tokens themselves.

    python benchmarks/to_tokenizer.py MODEL.gguf FOLDER

Needs `transformers` and `gguf`, not torch. Byte-level BPE vocabularies only (`tokenizer.ggml.model` "gpt2"), split as
SmolLM and GPT-2 split text. The chat template comes along, so the folder renders prompts as the server does.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SINGLE_DIGITS = {"smollm": True, "gpt-2": False, "default": False}
CONTROL = 3


def field(reader: GGUFReader, name: str) -> Any:
    """A metadata value; None if the file does not have it."""
    found = reader.fields.get(f"tokenizer.{name}")
    return None if found is None else found.contents()


def build(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The tokenizer of one file. Exits with what is not supported."""
    kind, split = field(reader, "ggml.model"), field(reader, "ggml.pre") or "default"
    if kind != "gpt2" or split not in SINGLE_DIGITS:
        sys.exit(
            f"cannot convert a {kind!r} vocabulary split as {split!r}; supported: gpt2, {', '.join(SINGLE_DIGITS)}"
        )
    tokens, types = field(reader, "ggml.tokens"), field(reader, "ggml.token_type")
    merges = [tuple(pair.split(" ", 1)) for pair in field(reader, "ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if SINGLE_DIGITS[split] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    ends = {name: field(reader, f"ggml.{name}_token_id") for name in ("bos", "eos")}
    named = {f"{name}_token": tokens[token] for name, token in ends.items() if token is not None}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = field(reader, "chat_template")
    return fast


def main() -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    tokenizer = build(GGUFReader(args.gguf))
    tokenizer.save_pretrained(args.folder)
    print(f"{args.folder}: {len(tokenizer)} tokens, {'with' if tokenizer.chat_template else 'no'} chat template")


if __name__ == "__main__":
    main()
