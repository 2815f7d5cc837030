"""Every trace format there is, by name, and a guess at which one a file has."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trunkline.wire.arrivals import AZURE_HEADER, read_azure, read_mooncake
from trunkline.wire.lmcache import read_lmcache
from trunkline.wire.otel import read_otel
from trunkline.wire.recorded import read_records
from trunkline.wire.swe_agent import read_swe_agent
from trunkline.wire.tau_bench import read_tau_bench
from trunkline.wire.traces import UNREADABLE, RunTrace, Session, TraceError, open_trace, read_runs, read_sessions
from trunkline.wire.weka import read_weka

AUTO = "auto"
GUESS_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Format:
    """One format. A JSON value with all of `keys` has it; `about` is one line for people."""

    read: Callable[[Path], Iterator[RunTrace]]
    keys: frozenset[str]
    about: str


def _format(read: Callable[[Path], Iterator[RunTrace]], keys: str, about: str) -> Format:
    return Format(read, frozenset(keys.split()), about)


FORMATS: Mapping[str, Format] = {
    "trunkline": _format(read_runs, "format id turns", "run traces of this project (docs/traces.md)"),
    "weka": _format(read_weka, "block_size requests", "coding-agent sessions as KV block ids (kv-cache-tester)"),
    "mooncake": _format(read_mooncake, "hash_ids input_length", "chat arrivals with 512-token block ids"),
    "lmcache": _format(read_lmcache, "session_id timestamp input", "agent sessions as text (lmcache-agent-trace)"),
    "swe_agent": _format(read_swe_agent, "history", "SWE-agent trajectories (.traj)"),
    "otel": _format(read_otel, "spans", "OpenTelemetry GenAI spans (inference-perf)"),
    "tau_bench": _format(read_tau_bench, "traj task_id", "tau-bench runs: tools, text, rewards"),
    "azure": _format(read_azure, AZURE_HEADER, "Azure LLM inference arrivals and lengths (CSV)"),
    "records": _format(read_records, "id turns totals", "what a Trunkline server recorded (GET /v1/runs/{id})"),
}
"""By name. `records` of a whole server are read by `trunkline trace export`."""


def read_trace(path: Path, name: str = AUTO) -> Iterator[RunTrace]:
    """Runs of a file or folder in the format `name`, one at a time. Raises `TraceError`."""
    if not path.exists():
        raise TraceError(path, None, "there is no such file")
    run = None
    for run in FORMATS[guess(path) if name == AUTO else name].read(path):
        yield run
    if run is None:
        raise TraceError(path, None, "it holds no run")


def read_trace_sessions(path: Path, name: str = AUTO) -> Iterator[Session]:
    """Sessions of a file or folder. Raises `TraceError`, also where runs do not fit together."""
    try:
        yield from read_sessions(read_trace(path, name))
    except TraceError:
        raise
    except ValueError as error:
        raise TraceError(path, None, str(error)) from error


def guess(path: Path) -> str:
    """The format of a file, or of a folder's first file that has one, by content. Raises `TraceError`."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    for file in files:
        if name := _guess(file):
            return name
    names = ", ".join(FORMATS)
    raise TraceError(path, None, f"its format cannot be told from its content; say which with --format: {names}")


def _guess(file: Path) -> str | None:
    try:
        with open_trace(file) as opened:
            line = opened.readline(GUESS_BYTES)
            if line.strip().decode("utf-8-sig", "replace") == AZURE_HEADER:
                return "azure"
            if line.startswith(b"SQLite format 3\0"):
                raise TraceError(file, None, "a server's records: read them with `trunkline trace export --data-dir`")
            value = _json(line)
            if value is None:
                value = _json(line + opened.read(GUESS_BYTES))
    except UNREADABLE as error:
        raise TraceError(file, None, f"cannot be read: {error}") from error
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict):
        return None
    if "messages_display" in value:
        return "tau_bench"
    return next((name for name, known in FORMATS.items() if known.keys <= value.keys()), None)


def _json(text: bytes) -> Any:
    """A JSON value, or None."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
