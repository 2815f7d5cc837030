"""The decision log: every fact the core was told and every plan it made, one JSON line each.

Facts and the times at which plans were asked for are all that decisions depend on: fed to a fresh core, they give the
same plans again (`replay`). Numbers are written in full, so that equal lines mean equal decisions.
"""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trunkline.core import actions, facts, types
from trunkline.core.actions import StepPlan
from trunkline.core.facts import Fact
from trunkline.core.policy import Core
from trunkline.core.types import CoreSettings

log = logging.getLogger("trunkline.journal")

_TYPES: dict[str, type] = {
    name: kind
    for module in (types, facts, actions)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and (is_dataclass(kind) or name == "RunKey")
}


class JournalError(ValueError):
    """A file that should hold a decision log does not."""


class Journal:
    """Writes a decision log. One thread uses it."""

    def __init__(self, path: Path, settings: CoreSettings) -> None:
        """Raises `OSError` if the file cannot be written."""
        self._file = path.open("w", encoding="utf-8")
        self._broken = False
        self.begin(settings)

    def begin(self, settings: CoreSettings) -> None:
        """A fresh core decides from here on."""
        self._write("settings", settings)

    def fact(self, fact: Fact) -> None:
        """The core was told this."""
        self._write("fact", fact)

    def plan(self, plan: StepPlan) -> None:
        """The core decided this."""
        self._write("plan", plan)

    def flush(self) -> None:
        """Hand what was written to the system, so that a killed process leaves a whole log."""
        self._guarded(self._file.flush)

    def close(self) -> None:
        """Write out what is buffered."""
        self._guarded(self._file.close)

    def _write(self, kind: str, value: object) -> None:
        line = json.dumps({kind: _plain(value)}, separators=(",", ":")) + "\n"
        self._guarded(lambda: self._file.write(line))

    def _guarded(self, operation: Callable[[], object]) -> None:
        """A log that cannot be written (a full disk) ends; serving goes on."""
        if self._broken:
            return
        try:
            operation()
        except OSError as error:
            self._broken = True
            log.error("the decision log ends here: %s", error)


def read(path: Path) -> Iterator[CoreSettings | Fact | StepPlan]:
    """A log's entries in order; settings say that a fresh core decides from here on. Raises `JournalError`."""
    number = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                (value,) = json.loads(line).values()
                entry = _built(value)
                if not isinstance(entry, CoreSettings | StepPlan | Fact):
                    raise TypeError(f"it holds a {type(entry).__name__}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise JournalError(f"{path}:{number}: not an entry of a decision log: {error}") from error
            yield entry
    if not number:
        raise JournalError(f"{path}: an empty decision log")


def replay(path: Path) -> Iterator[tuple[StepPlan, StepPlan]]:
    """Feed a log's facts to a fresh core; yields (plan in the log, plan made now) for every plan."""
    core: Core | None = None
    for entry in read(path):
        if isinstance(entry, CoreSettings):
            core = Core(entry)
            continue
        assert core is not None, "a log begins with its settings"
        if isinstance(entry, StepPlan):
            yield entry, core.plan(entry.at_ms)
        else:
            core.handle(entry)


def _plain(value: Any) -> Any:
    """JSON for a value of the core's types; classes are named under `_`."""
    if isinstance(value, np.ndarray):
        return {"_": "array", "values": value.tolist()}
    if isinstance(value, types.RunKey):
        return {"_": "RunKey", "salt": value.salt, "run": value.run}
    if is_dataclass(value):
        return {"_": type(value).__name__} | {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _built(value: Any) -> Any:
    """The value that `_plain` wrote."""
    if isinstance(value, list):
        return tuple(_built(item) for item in value)
    if not isinstance(value, dict):
        return value
    name = value["_"]
    if name == "array":
        return np.array(value["values"], np.int32)
    kind = _TYPES[name]
    known = {f.name: f.type for f in fields(kind)} if is_dataclass(kind) else {}
    built = {key: _built(item) for key, item in value.items() if key != "_"}
    for key, annotation in known.items():
        if isinstance(annotation, type) and issubclass(annotation, str) and annotation is not str:
            built[key] = annotation(built[key])
    return kind(**built)
