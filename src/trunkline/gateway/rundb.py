"""The SQLite file behind run records: its schema, its lock, and what can be read from it.

    RecordsError
    ├── DataDirLocked     another live process writes here
    ├── NewerSchema       written by a later version
    └── DamagedRecords    not a database, or one that SQLite cannot read

Raised while opening; a message names the fix.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Any

import msgspec

from trunkline.core.types import RunKey, RunOrigin
from trunkline.wire.records import DiffRow, MissRow, RunRow, RunTotals, RunView, TurnRow

SCHEMA = """
CREATE TABLE schema (version INTEGER NOT NULL);
CREATE TABLE runs (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    salt TEXT NOT NULL, id TEXT NOT NULL, scope TEXT NOT NULL,
    parent TEXT, name TEXT, objective TEXT, expected_turns INTEGER,
    finished INTEGER NOT NULL DEFAULT 0, origin TEXT NOT NULL, node TEXT NOT NULL DEFAULT '',
    started_at REAL NOT NULL, last_at REAL NOT NULL,
    turns INTEGER NOT NULL DEFAULT 0, prompt_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0, reusable_tokens INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0, cost_usd REAL NOT NULL DEFAULT 0,
    last_prompt_tokens INTEGER NOT NULL DEFAULT 0,
    UNIQUE (salt, id)
);
CREATE INDEX runs_by_id ON runs (scope, id);
CREATE INDEX runs_by_parent ON runs (scope, parent);
CREATE TABLE turns (
    seq INTEGER PRIMARY KEY,
    run INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    "index" INTEGER NOT NULL, at REAL NOT NULL, node TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, novel_tokens INTEGER NOT NULL,
    reusable_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, misses BLOB NOT NULL,
    queue_ms REAL NOT NULL, prefill_ms REAL NOT NULL, decode_ms REAL NOT NULL, latency_ms REAL NOT NULL,
    tool_gap_ms REAL, finish_reason TEXT NOT NULL, cost_usd REAL NOT NULL
);
CREATE INDEX turns_by_run ON turns (run, seq);
"""
"""The first version. A new file is made by this and every migration, so that there is one way to each version."""

MIGRATIONS = (
    # 2: what of a prompt was normalized
    "ALTER TABLE turns ADD COLUMN normalized BLOB NOT NULL DEFAULT '{}';",
    # 3: how turns were given to their runs
    "ALTER TABLE runs ADD COLUMN session TEXT;"
    "ALTER TABLE turns ADD COLUMN relation TEXT NOT NULL DEFAULT '';"
    "ALTER TABLE turns ADD COLUMN shared_tokens INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE turns ADD COLUMN passages INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE turns ADD COLUMN prompt_digest TEXT NOT NULL DEFAULT '';",
    # 4: where a prompt left the prefix that it should have shared
    "ALTER TABLE turns ADD COLUMN diff BLOB NOT NULL DEFAULT 'null';",
    # 5: what a grammar did
    'ALTER TABLE turns ADD COLUMN "constraint" TEXT;'
    "ALTER TABLE turns ADD COLUMN forced_tokens INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE turns ADD COLUMN saved_passes INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE turns ADD COLUMN mask_ms REAL NOT NULL DEFAULT 0;",
    # 6: how long a run waited to be let in
    "ALTER TABLE turns ADD COLUMN admission_ms REAL NOT NULL DEFAULT 0;",
)
"""From version 1 on, the statements that lead to the next. What has landed is never edited."""

SCHEMA_VERSION = 1 + len(MIGRATIONS)

_TURN_COLUMNS = TurnRow.__struct_fields__
INSERT_TURN = "INSERT INTO turns (run, {}) VALUES (?{})".format(
    ", ".join(f'"{name}"' for name in _TURN_COLUMNS), ", ?" * len(_TURN_COLUMNS)
)
_decode = {
    "misses": msgspec.json.Decoder(tuple[MissRow, ...]).decode,
    "normalized": msgspec.json.Decoder(dict[str, int]).decode,
    "diff": msgspec.json.Decoder(DiffRow | None).decode,
}
"""Columns that hold JSON, with what reads them."""


class RecordsError(Exception):
    """Root of what can go wrong while opening records."""


class DataDirLocked(RecordsError):
    """Another live process writes to the same file."""


class NewerSchema(RecordsError):
    """The file was written by a later version."""


class DamagedRecords(RecordsError):
    """SQLite cannot read the file."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that was not finished when the process that served it stopped. `digest` is that of its last prompt."""

    salt: str
    run: str
    parent: str | None
    turns: int
    prompt_tokens: int
    origin: RunOrigin
    session: str | None
    digest: str


def turn_values(row: TurnRow) -> tuple[Any, ...]:
    """`row` in the order of `INSERT_TURN`, without the run."""
    return tuple(
        msgspec.json.encode(value) if name in _decode else value
        for name, value in zip(_TURN_COLUMNS, msgspec.structs.astuple(row), strict=True)
    )


def lock_beside(path: Path) -> IO[str]:
    """Take the lock that lets one process write `path`; closing the file, or dying, gives it back."""
    lock_path = path.with_suffix(".lock")
    lock = lock_path.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise DataDirLocked(
            f"{path.parent} is in use by another server (process {owner}); stop it or choose another --data-dir."
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def connect(path: Path | None) -> sqlite3.Connection:
    """A connection for writing, the schema made or brought up to date. `path` None keeps everything in memory."""
    with _opening(path):
        connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        with _closing_on_error(connection):
            connection.execute("PRAGMA journal_mode = WAL")
            # A killed process loses nothing that was committed; a power cut may lose the last commits, never the file.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'schema'").fetchone():
                connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} INSERT INTO schema VALUES (1); COMMIT;")
            for version in range(_check_version(connection, path), SCHEMA_VERSION):
                step = f"{MIGRATIONS[version - 1]} UPDATE schema SET version = {version + 1};"
                connection.executescript(f"BEGIN IMMEDIATE; {step} COMMIT;")
    return connection


def open_reader(path: Path) -> "RunReader":
    """Read the records of a server, live or stopped, without its lock. Raises `FileNotFoundError`, `RecordsError`.

    A file of an earlier version is read as it is: what it has no column for has its default.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; no server has kept records there yet.")
    with _opening(path):
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        with _closing_on_error(connection):
            _check_version(connection, path)
    return RunReader(connection, Lock())


@contextmanager
def _opening(path: Path | None) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise DamagedRecords(
            f"{path} cannot be opened ({error}); check its permissions, or move it away to start afresh."
        ) from error


@contextmanager
def _closing_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _check_version(connection: sqlite3.Connection, path: Path | None) -> int:
    """The file's version. Raises `NewerSchema`."""
    (version,) = connection.execute("SELECT coalesce(max(version), 0) FROM schema").fetchone()
    if version > SCHEMA_VERSION:
        raise NewerSchema(
            f"{path} has schema {version}, this version reads up to {SCHEMA_VERSION}; "
            "upgrade trunkline or choose another --data-dir."
        )
    return int(version)


class RunReader:
    """What can be asked of the records. Thread-safe; every call blocks on the disk. `scope` None means all keys."""

    def __init__(self, connection: sqlite3.Connection, lock: Lock) -> None:
        self._connection = connection
        self._lock = lock
        """Held during a query; shared with the writer where both use one connection."""
        here = {row[1] for row in self._all("PRAGMA table_info (turns)")}
        self._turn_columns = [name for name in _TURN_COLUMNS if name in here]
        runs = {row[1] for row in self._all("PRAGMA table_info (runs)")}
        self._session = "session" if "session" in runs else "NULL"

    def _all(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    def locate(self, scope: str | None, run: str) -> RunKey | None:
        """The full key of the newest run with this id."""
        found = self._locate(scope, run)
        return found and RunKey(found[1], run)

    def _locate(self, scope: str | None, run: str) -> tuple[int, str] | None:
        rows = self._all(
            "SELECT key, salt FROM runs WHERE id = ? AND scope = coalesce(?, scope) ORDER BY last_at DESC LIMIT 1",
            run,
            scope,
        )
        return (rows[0][0], rows[0][1]) if rows else None

    def runs(self, scope: str | None, limit: int, before: str | None = None) -> list[RunRow]:
        """At most `limit` runs, newest first, that began before the run `before` (an unknown one gives none)."""
        key = 2**63 - 1
        if before is not None:
            found = self._locate(scope, before)
            key = found[0] if found else 0
        rows = self._all(
            f"SELECT id, name, {self._session}, parent, finished, origin, node, started_at, last_at, turns, "
            "prompt_tokens, cached_tokens, reusable_tokens, completion_tokens, cost_usd "
            "FROM runs WHERE scope = coalesce(?, scope) AND key < ? ORDER BY key DESC LIMIT ?",
            scope,
            key,
            limit,
        )
        fields = RunRow.__struct_fields__
        return [RunRow(**{**dict(zip(fields, row, strict=True)), "state": _state(row[4])}) for row in rows]

    def run(self, scope: str | None, run: str) -> RunView | None:
        """One run with all its turns."""
        found = self._locate(scope, run)
        if found is None:
            return None
        key, salt = found
        (row,) = self._all(
            "SELECT parent, name, objective, expected_turns, finished, origin, node, started_at, last_at, "
            "turns, prompt_tokens, cached_tokens, reusable_tokens, completion_tokens, cost_usd, "
            f"{self._session} FROM runs WHERE key = ?",
            key,
        )
        children = self._all("SELECT id FROM runs WHERE salt = ? AND parent = ? ORDER BY key", salt, run)
        return RunView(
            id=run,
            session=row[15],
            parent=row[0],
            name=row[1],
            objective=row[2],
            expected_turns=row[3],
            children=tuple(child for (child,) in children),
            state=_state(row[4]),
            origin=row[5],
            node=row[6],
            started_at=row[7],
            last_at=row[8],
            turns=self._turns(key),
            totals=RunTotals(**dict(zip(RunTotals.__struct_fields__, row[9:15], strict=True))),
        )

    def _turns(self, key: int) -> tuple[TurnRow, ...]:
        columns = self._turn_columns
        names = ", ".join(f'"{name}"' for name in columns)
        rows = self._all(f"SELECT {names} FROM turns WHERE run = ? ORDER BY seq", key)
        return tuple(_turn(dict(zip(columns, values, strict=True))) for values in rows)

    def open_runs(self) -> list[OpenRun]:
        """Every run that is not finished, oldest first."""
        last = "SELECT prompt_digest FROM turns WHERE run = runs.key ORDER BY seq DESC LIMIT 1"
        rows = self._all(
            "SELECT salt, id, parent, turns, last_prompt_tokens, origin, session, "
            f"coalesce(({last}), '') FROM runs WHERE NOT finished ORDER BY key"
        )
        return [
            OpenRun(salt, run, parent, turns, tokens, RunOrigin(origin), session, digest)
            for salt, run, parent, turns, tokens, origin, session, digest in rows
        ]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _state(finished: int) -> str:
    return "finished" if finished else "waiting"


def _turn(fields: dict[str, Any]) -> TurnRow:
    for name in _decode.keys() & fields.keys():
        fields[name] = _decode[name](fields[name])
    return TurnRow(**fields)
