"""A GGUF model in memory: what it is, what its KV costs, whether that KV can be cut."""

import ctypes
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp

from trunkline.engine.errors import ModelError

_log = logging.getLogger(__name__)
_LLAMA_ERROR = 4  # GGML_LOG_LEVEL_ERROR of ggml.h
_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_CELL_BYTES = 12  # of every token's position and owner in a saved state
_recent: deque[str] = deque(maxlen=8)
_quiet: list[bool] = []


def _listen(level: int, text: bytes, _user: Any) -> None:
    line = text.decode(errors="replace").strip()
    if level == _LLAMA_ERROR and line:
        _recent.append(line)
        if not _quiet:
            _log.error("llama.cpp: %s", line)


# llama.cpp logs through one callback a process; this one must outlive every model.
_listener = llama_cpp.llama_log_callback(_listen)


@functools.cache
def _start_backend() -> None:
    llama_cpp.llama_log_set(_listener, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


@contextmanager
def llama_errors() -> Iterator[deque[str]]:
    """llama.cpp's error lines of what runs inside (the latest eight), instead of logging them."""
    _start_backend()
    _recent.clear()
    _quiet.append(True)
    try:
        yield _recent
    finally:
        _quiet.pop()


@dataclass(slots=True, eq=False)
class Model:
    """A loaded model. `pointer` and `vocab` are llama.cpp's; they are invalid after `close`.

    A run of n tokens takes at most `n * kv_bytes_per_token + checkpoint_bytes` (f16 KV), in a slot and saved. The
    second part, a window's or a running state's, is 0 for `cuttable` memory.
    """

    path: Path
    pointer: int
    vocab: int
    gpu_layers: int
    kv_bytes_per_token: int = 0
    checkpoint_bytes: int = 0

    @property
    def n_vocab(self) -> int:
        """Vocabulary size: the width of a row of logits."""
        return int(llama_cpp.llama_vocab_n_tokens(self.vocab))

    @property
    def n_ctx_train(self) -> int:
        """Positions the model was trained for; beyond them it produces noise."""
        return int(llama_cpp.llama_model_n_ctx_train(self.pointer))

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return int(llama_cpp.llama_model_n_layer(self.pointer))

    @property
    def n_swa(self) -> int:
        """Sliding window in tokens; 0 without one."""
        return int(llama_cpp.llama_model_n_swa(self.pointer))

    @property
    def is_recurrent(self) -> bool:
        """All of its memory is a running state (Mamba, RWKV)."""
        return bool(llama_cpp.llama_model_is_recurrent(self.pointer))

    @property
    def is_hybrid(self) -> bool:
        """Some layers keep a running state, others KV (Jamba, Qwen3-Next)."""
        return bool(llama_cpp.llama_model_is_hybrid(self.pointer))

    @property
    def cuttable(self) -> bool:
        """Whether its memory can be cut after any token: plain KV, one position a token, no window."""
        plain_rope = (llama_cpp.LLAMA_ROPE_TYPE_NONE, llama_cpp.LLAMA_ROPE_TYPE_NORM, llama_cpp.LLAMA_ROPE_TYPE_NEOX)
        one_position = llama_cpp.llama_model_rope_type(self.pointer) in plain_rope
        return one_position and not (self.is_recurrent or self.is_hybrid or self.n_swa)

    @property
    def name(self) -> str:
        """`general.name`, or the file's name."""
        return self.metadata("general.name") or self.path.stem

    @property
    def arch(self) -> str:
        """`general.architecture`."""
        return self.metadata("general.architecture") or "unknown"

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja), if it has one."""
        text = llama_cpp.llama_model_chat_template(self.pointer, None)
        return None if text is None else text.decode()

    @property
    def weight_bytes(self) -> int:
        """Size of all tensors."""
        return int(llama_cpp.llama_model_size(self.pointer))

    def metadata(self, key: str) -> str | None:
        """A GGUF metadata value as text; None if the file has no such key or it holds an array."""
        needed = llama_cpp.llama_model_meta_val_str(self.pointer, key.encode(), None, 0)
        if needed < 0:
            return None
        buffer = ctypes.create_string_buffer(needed + 1)
        llama_cpp.llama_model_meta_val_str(self.pointer, key.encode(), buffer, needed + 1)
        return buffer.value.decode(errors="replace")

    def close(self) -> None:
        """Free the weights. Every context made of the model must be closed before."""
        if self.pointer:
            llama_cpp.llama_model_free(self.pointer)
            self.pointer = self.vocab = 0


def load_model(path: Path, gpu_layers: int = 0) -> Model:
    """Load a GGUF file, with `gpu_layers` layers on a GPU (-1: all). Raises `ModelError`, which names the fix."""
    _check_file(path)
    with llama_errors() as errors:
        if gpu_layers != 0 and not llama_cpp.llama_supports_gpu_offload():
            raise ModelError(
                f"gpu_layers = {gpu_layers}, but this llama-cpp-python was built without GPU support; reinstall it, "
                "for CUDA with: CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall --no-binary :all: "
                "--no-deps llama-cpp-python==0.3.36"
            )
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        pointer = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise ModelError(f"llama.cpp cannot load {path}: {_explain(errors)}")
    model = Model(path, pointer, llama_cpp.llama_model_get_vocab(pointer), gpu_layers)
    generates = llama_cpp.llama_model_has_decoder(pointer) and not llama_cpp.llama_model_has_encoder(pointer)
    if not generates or llama_cpp.llama_model_is_diffusion(pointer) or model.n_vocab == 0:
        arch = model.arch
        model.close()
        raise ModelError(f"{path} ({arch}) does not generate text token by token; serve a decoder-only model instead")
    model.kv_bytes_per_token, model.checkpoint_bytes = _kv_cost(model)
    return model


def identity(path: Path, cache_dir: Path) -> str:
    """The SHA-256 of a model file's content (of all shards, if it is split): KV is valid under equal identities only.

    Only the content will do: two fine-tunes of one model differ in nothing but their weights. Hashing runs at
    about 1 GB/s, so the answer is kept in `cache_dir`, under the file's path, size and time of change.
    """
    key = "|".join(f"{p.resolve()}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in _shards(path))
    note = cache_dir / f"identity-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(note.read_text())
        if known["file"] == key:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        _log.debug("no usable %s", note)  # absent or half written: hash again
    digest = hashlib.sha256()
    for shard in _shards(path):
        with shard.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=cache_dir, suffix=".part", delete=False) as part:
        json.dump({"file": key, "sha256": digest.hexdigest()}, part)
    Path(part.name).replace(note)
    return digest.hexdigest()


def _kv_cost(model: Model) -> tuple[int, int]:
    """Bytes a token and bytes once, read off the states of a sequence of one token and of two.

    Metadata would not do: it does not say what a running state takes, nor which layers share or have no KV.
    """
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = 256, 1, 1, 1
    whole, part = [], []
    with llama_errors() as errors:
        context = llama_cpp.llama_init_from_model(model.pointer, params)
        token = (ctypes.c_int32 * 1)(0)
        for _ in range(2):
            if not context or llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(token, 1)) != 0:
                raise ModelError(f"llama.cpp cannot compute with {model.path}: {_explain(errors)}")
            whole.append(llama_cpp.llama_state_seq_get_size(context, 0))
            part.append(llama_cpp.llama_state_seq_get_size_ext(context, 0, _PARTIAL))
        llama_cpp.llama_free(context)
    if model.cuttable:
        return whole[1] - whole[0] - _CELL_BYTES, 0
    # The partial state is what the window or the running state holds.
    grows = part[1] - part[0]
    return whole[1] - whole[0] - grows, part[0] + grows * max(0, model.n_swa - 1)


def _shards(path: Path) -> list[Path]:
    """All files of a model: `x-00001-of-00003.gguf` stands for three."""
    split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if split is None:
        return [path]
    return [path.with_name(f"{split[1]}-{i:05}-of-{split[2]}.gguf") for i in range(1, int(split[2]) + 1)]


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ModelError(f"no model at {path}; give the path of a GGUF file") from None
    except IsADirectoryError:
        raise ModelError(f"{path} is a directory; give the path of one GGUF file in it") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file (it starts with {magic!r}); convert the model to GGUF first")


def _explain(errors: deque[str]) -> str:
    """The most telling of llama.cpp's error lines, with the fix where it is known."""
    lines = list(errors)
    for line in lines:
        if found := re.search(r"unknown model architecture: '([^']*)'", line):
            return f"its architecture '{found[1]}' is not supported by llama-cpp-python {llama_cpp.__version__}"
        if "within the file bounds" in line or "corrupted or incomplete" in line:
            return f"the file is cut short; fetch it again ({line})"
    return lines[0] if lines else "it gave no reason"
