"""Settings: one frozen table, each default in one place. Only this module reads the environment.

A setting comes from the command line, else from the TOML file given with `--config` (same names, dashes or
underscores), else from its default. API keys may also come from `TRUNKLINE_API_KEYS` (separated by commas).
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trunkline.core.types import Admission, Eviction, Order, Sharing
from trunkline.wire.noise import DEFAULT, Normalizer

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


LISTS = {"api_keys": "--api-key", "model_aliases": "--model-alias"}
"""Settings of several values, and the flags that give one more of them."""


class ConfigError(ValueError):
    """A setting cannot be used; the message names the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What `trunkline serve` can be told. None means: chosen from the model and the machine."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=8000, metadata={"help": "port to listen on; 0 picks a free one"})
    model: Path | None = field(
        default=None, metadata={"help": "a GGUF file (default: SmolLM2-135M-Instruct from the smollm2 extra)"}
    )
    model_name: str | None = field(default=None, metadata={"help": "the name clients ask for (default: from the file)"})
    model_aliases: tuple[str, ...] = field(
        default=(), metadata={"help": "another name the model answers to (may be given again)"}
    )
    any_model: bool = field(default=False, metadata={"help": "answer to every model name that clients send"})
    ctx: int | None = field(default=None, metadata={"help": "tokens a turn may hold, prompt and answer"})
    kv_bytes: int | None = field(
        default=None,
        metadata={"help": "KV of the working slots, one a turn in flight (default: 8 slots)", "size": True},
    )
    host_bytes: int | None = field(
        default=None, metadata={"help": "host memory for remembered prefixes (default: a quarter of RAM)", "size": True}
    )
    disk_bytes: int = field(default=0, metadata={"help": "disk for parked prefixes; only 0 for now", "size": True})
    data_dir: Path | None = field(
        default=None, metadata={"help": "where run records live (default: under $XDG_DATA_HOME)"}
    )
    response_bytes: int = field(
        default=256 * 10**6, metadata={"help": "disk for stored responses (`previous_response_id`)", "size": True}
    )
    gpu_layers: int = field(default=0, metadata={"help": "layers to run on a GPU, -1 for all (passed on to llama.cpp)"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads (default: one a physical core)"})
    flash_attention: str = field(default="default", metadata={"help": "on, off, or default (measured: off on CPUs)"})
    sharing: Sharing = field(default=Sharing.TREE, metadata={"help": "tree: reuse prefixes; off: compute every prompt"})
    eviction: Eviction = field(default=Eviction.VALUE, metadata={"help": "what host memory gives up first"})
    order: Order = field(default=Order.SHORT_FIRST, metadata={"help": "who goes first"})
    step_budget_ms: float = field(default=100.0, metadata={"help": "longest a prefill slice may hold the engine"})
    prefill_share: float = field(
        default=0.25, metadata={"help": "share of time a long prefill keeps beside short steps"}
    )
    admission: Admission = field(
        default=Admission.PREDICTED, metadata={"help": "which new runs are let in: predicted, off, runs-cap, turns-cap"}
    )
    admission_cap: int = field(default=8, metadata={"help": "open runs, or turns in flight, that a cap lets in"})
    stretch_objective: float = field(
        default=8.0, metadata={"help": "nine in ten interactive runs take at most this times their ideal time"}
    )
    short_step_objective_ms: float | None = field(
        default=None, metadata={"help": "p95 of steps of at most 64 tokens, for interactive runs (default: none)"}
    )
    max_waiting_runs: int = field(default=256, metadata={"help": "new runs of a class that may wait to be let in"})
    max_wait_s: float = field(
        default=120.0, metadata={"help": "an interactive run is refused if it is predicted to wait longer than this"}
    )
    api_keys: tuple[str, ...] = field(
        default=(), metadata={"help": "accepted keys (may be given again; default: open)"}
    )
    share_cache_across_keys: bool = field(default=False, metadata={"help": "let keys hit each other's prefixes"})
    normalize: tuple[Normalizer, ...] = field(
        default=DEFAULT,
        metadata={"help": f"client noise to hold still, separated by commas: {', '.join(Normalizer)}; or none"},
    )
    max_body_bytes: int = field(default=8 * 2**20, metadata={"help": "largest request body", "size": True})
    drain_timeout_s: float = field(default=30.0, metadata={"help": "on SIGTERM, how long running turns may take"})
    decision_log: Path | None = field(default=None, metadata={"help": "write every fact and plan to this file"})

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "--port must lie between 0 and 65535")
        _require(self.ctx is None or self.ctx >= 64, "--ctx must be at least 64 tokens")
        _require(self.disk_bytes == 0, "--disk-bytes: this version keeps no prefixes on disk; leave it at 0")
        _require(self.threads is None or self.threads >= 1, "--threads must be at least 1")
        _require(self.gpu_layers >= -1, "--gpu-layers is a number of layers, or -1 for all")
        _require(self.flash_attention in ("default", "on", "off"), "--flash-attention is on, off or default")
        _require(1.0 <= self.step_budget_ms <= 60_000, "--step-budget-ms must lie between 1 and 60000")
        _require(0.0 < self.prefill_share < 1.0, "--prefill-share must lie between 0 and 1")
        _require(self.admission_cap >= 1, "--admission-cap must be at least 1")
        _require(self.stretch_objective > 1.0, "--stretch-objective must be over 1, which is a run alone")
        _require(
            self.short_step_objective_ms is None or self.short_step_objective_ms > 0,
            "--short-step-objective-ms must be over 0; leave it out for no objective",
        )
        _require(self.max_waiting_runs >= 0, "--max-waiting-runs cannot be negative; 0 lets nobody wait")
        _require(0.0 <= self.max_wait_s <= 86_400, "--max-wait-s must lie between 0 and 86400")
        _require(0.0 <= self.drain_timeout_s <= 86_400, "--drain-timeout-s must lie between 0 and 86400")
        _require(self.max_body_bytes >= 1024, "--max-body-bytes must be at least 1KB")
        _require(self.host_bytes is None or self.host_bytes >= 0, "--host-bytes cannot be negative")
        _require(self.response_bytes >= 0, "--response-bytes cannot be negative; 0 stores none")
        _require(all(self.model_aliases), "--model-alias: an empty name names nothing; leave it out instead")
        _require(all(self.api_keys), "--api-key: an empty key would let everybody in; leave it out instead")


def load(given: Mapping[str, Any], config: Path | None, environment: Mapping[str, str] = os.environ) -> ServeSettings:
    """Settings from the command line (`given`, by field name) over a TOML file over defaults. Raises `ConfigError`."""
    values = _from_file(config) if config is not None else {}
    if environment.get("TRUNKLINE_API_KEYS"):
        values.setdefault("api_keys", tuple(k for k in environment["TRUNKLINE_API_KEYS"].split(",") if k))
    values.update(given)
    return ServeSettings(**values)


def parse_size(text: str) -> int:
    """Bytes from `80MB`, `2GB`, `512MiB`, `1000`. Raises `ConfigError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is no size; write it like 80MB, 2GB or 512MiB")
    return int(float(match[1]) * unit)


def data_dir(settings: ServeSettings, environment: Mapping[str, str] = os.environ) -> Path:
    """Where run records live."""
    return settings.data_dir or default_data_dir(environment)


def default_data_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """`trunkline` in the user's data directory."""
    home = environment.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "trunkline"


def model_cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the requantized default model is kept."""
    home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "trunkline" / "models"


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """RAM that this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (root / "sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def convert(name: str, text: str) -> Any:
    """A setting's value from its text form. Raises `ConfigError`."""
    kinds = {f.name: f for f in fields(ServeSettings)}
    spec = kinds[name]
    if spec.metadata.get("size"):
        return parse_size(text)
    annotation = str(spec.type)
    for marker, kind in _CONVERTERS.items():
        if marker in annotation:
            try:
                return kind(text)
            except (ValueError, KeyError):
                raise ConfigError(f"--{name.replace('_', '-')}: {text!r} is not valid; {_expects(kind)}") from None
    return text


def _normalizers(text: str) -> tuple[Normalizer, ...]:
    """`default`, `none`, or names separated by commas."""
    if text == "default":
        return DEFAULT
    return () if text == "none" else tuple(dict.fromkeys(Normalizer(name.strip()) for name in text.split(",")))


_CONVERTERS: dict[str, Any] = {
    "Normalizer": _normalizers,
    "Path": lambda text: Path(text).expanduser(),
    "Sharing": Sharing,
    "Eviction": Eviction,
    "Order": Order,
    "Admission": Admission,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "float": float,
    "int": int,
}


def _expects(kind: Any) -> str:
    if kind in (Sharing, Eviction, Order, Admission):
        return "choose " + " or ".join(kind)
    if kind is _normalizers:
        return f"name some of {', '.join(Normalizer)}, or say default or none"
    return "it must be a number" if kind in (int, float) else "it is true or false"


def _from_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    names = [f.name for f in fields(ServeSettings)]
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"
            raise ConfigError(f"{path}: unknown setting {key!r}{hint}")
        values[name] = _from_toml(path, name, value)
    return values


def _from_toml(path: Path, name: str, value: Any) -> Any:
    if name in LISTS:
        several = [value] if isinstance(value, str) else value
        if not (isinstance(several, list) and all(isinstance(one, str) for one in several)):
            raise ConfigError(f'{path}: {name} is a list of strings, like ["one", "two"]')
        return tuple(several)
    if isinstance(value, list | dict):
        raise ConfigError(f"{path}: {name} takes one value")
    return convert(name, _text(value))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
