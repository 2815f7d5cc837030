"""Random models of a few kilobytes whose memory is a running state: no packaged real model has one."""

import struct
from pathlib import Path

import numpy as np

VOCAB, WIDTH = 128, 32
_ALIGN = 32

Field = int | float | str | list[int]


def write_mamba(path: Path) -> Path:
    """Two Mamba layers: all memory is recurrent."""
    inner, state, rank, kernel = 2 * WIDTH, 8, 4, 4
    fields = _common("mamba") | {
        "mamba.ssm.conv_kernel": kernel,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
        "mamba.attention.head_count": 0,
        "mamba.feed_forward_length": 0,
        "mamba.attention.layer_norm_rms_epsilon": 1e-5,
    }
    shapes = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (WIDTH,),
            f"blk.{i}.ssm_in.weight": (2 * inner, WIDTH),
            f"blk.{i}.ssm_conv1d.weight": (inner, kernel),
            f"blk.{i}.ssm_conv1d.bias": (inner,),
            f"blk.{i}.ssm_x.weight": (rank + 2 * state, inner),
            f"blk.{i}.ssm_dt.weight": (inner, rank),
            f"blk.{i}.ssm_dt.bias": (inner,),
            f"blk.{i}.ssm_a": (inner, state),
            f"blk.{i}.ssm_d": (inner,),
            f"blk.{i}.ssm_out.weight": (WIDTH, inner),
        }
    return _write(path, fields, shapes)


def write_lfm2(path: Path) -> Path:
    """One short-convolution layer and one attention layer: memory is half recurrent, half KV."""
    kernel, heads, hidden = 3, 2, 48
    fields = _common("lfm2") | {
        "lfm2.shortconv.l_cache": kernel,
        "lfm2.attention.head_count": heads,
        "lfm2.attention.head_count_kv": [0, heads],
        "lfm2.feed_forward_length": hidden,
        "lfm2.attention.layer_norm_rms_epsilon": 1e-5,
        "lfm2.rope.freq_base": 10000.0,
    }
    shapes = {"token_embd.weight": (VOCAB, WIDTH), "token_embd_norm.weight": (WIDTH,)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (WIDTH,),
            f"blk.{i}.ffn_norm.weight": (WIDTH,),
            f"blk.{i}.ffn_gate.weight": (hidden, WIDTH),
            f"blk.{i}.ffn_up.weight": (hidden, WIDTH),
            f"blk.{i}.ffn_down.weight": (WIDTH, hidden),
        }
    shapes |= {
        "blk.0.shortconv.conv.weight": (WIDTH, kernel),
        "blk.0.shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
        "blk.0.shortconv.out_proj.weight": (WIDTH, WIDTH),
        "blk.1.attn_q_norm.weight": (WIDTH // heads,),
        "blk.1.attn_k_norm.weight": (WIDTH // heads,),
    }
    shapes |= {f"blk.1.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    return _write(path, fields, shapes)


def write_unknown(path: Path) -> Path:
    """A well-formed GGUF of an architecture that nothing supports."""
    return _write(path, _common("nonesuch"), {"token_embd.weight": (VOCAB, WIDTH)})


def _common(arch: str) -> dict[str, Field]:
    return {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        f"{arch}.context_length": 1024,
        f"{arch}.embedding_length": WIDTH,
        f"{arch}.block_count": 2,
        f"{arch}.vocab_size": VOCAB,
        "tokenizer.ggml.model": "none",
    }


def _write(path: Path, fields: dict[str, Field], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A GGUF (version 3) with random float32 tensors; shapes are row-major, GGUF wants them reversed."""
    rng = np.random.default_rng(7)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(fields))
    head += b"".join(_string(key) + _value(value) for key, value in fields.items())
    data = b""
    for name, shape in shapes.items():
        scale = -1.0 if name.endswith("ssm_a") else 1.0  # a decay, negative like a trained one
        tensor = (scale * np.abs(rng.normal(0, 0.4, shape)) if scale < 0 else rng.normal(0, 0.4, shape)).astype("<f4")
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += _string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", 0, len(data))
        data += tensor.tobytes() + b"\0" * (-tensor.nbytes % _ALIGN)
    path.write_bytes(head + b"\0" * (-len(head) % _ALIGN) + data)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Field) -> bytes:
    match value:
        case str():
            return struct.pack("<I", 8) + _string(value)
        case float():
            return struct.pack("<If", 6, value)
        case int():
            return struct.pack("<II", 4, value)
        case list():
            return struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
