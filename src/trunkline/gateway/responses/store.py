"""Stored responses, so that a request may go on from one by its id: in SQLite, bounded in count and bytes.

A response is stored with its own input only; the conversation before it is the chain of `previous` ids. Going on from
a response uses its whole chain, so that what is forgotten first is the chain that nobody went on with for longest. Ids
are seen only in the scope that made them.
"""

import logging
import sqlite3
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import msgspec

from trunkline.gateway.rundb import DamagedRecords, NewerSchema
from trunkline.wire.responses import Item

log = logging.getLogger("trunkline.gateway")

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, scope TEXT NOT NULL, previous TEXT,
    used INTEGER NOT NULL, bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used, key);
CREATE TABLE IF NOT EXISTS contents (
    key INTEGER PRIMARY KEY REFERENCES responses ON DELETE CASCADE, input BLOB NOT NULL, document BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS items (
    id TEXT PRIMARY KEY, key INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_by_response ON items (key);
"""
# Two tables, because using a response rewrites its row, and a conversation's text should lie still.

TOUCH = """
WITH RECURSIVE chain (id) AS (
    VALUES (?) UNION SELECT previous FROM responses JOIN chain USING (id) WHERE previous IS NOT NULL
)
UPDATE responses SET used = ? WHERE id IN (SELECT id FROM chain)
"""


class _Output(msgspec.Struct):
    """The part of a document that later requests stand on."""

    output: list[Item]


_encode_items = msgspec.json.Encoder().encode
_decode_items = msgspec.json.Decoder(list[Item]).decode
_decode_output = msgspec.json.Decoder(_Output).decode


@dataclass(frozen=True, slots=True)
class Stored:
    """One response. `document` is the JSON that its client got, `input` what the request itself added."""

    id: str
    previous: str | None
    input: list[Item]
    document: bytes

    def output(self) -> list[Item]:
        """What the model said, as items."""
        return _decode_output(self.document).output

    def items(self) -> list[Item]:
        """What this response adds to a conversation."""
        return [*self.input, *self.output()]


class ResponseStore:
    """Responses by id. Thread-safe. Writes return at once and are seen at once; reads block on the disk.

    `path` None keeps them in memory. A response larger than `max_bytes` is not kept. A write that fails (disk full) is
    logged, and its response forgotten. Raises `DamagedRecords` for a file that SQLite cannot read, and `NewerSchema`
    for one that a later version wrote.
    """

    def __init__(self, path: Path | None, *, max_bytes: int, max_count: int = 100_000) -> None:
        self._max_bytes, self._max_count = max_bytes, max_count
        self._disk = Lock()
        """Held while the connection is used."""
        self._memory = Lock()
        """Held while `_pending` is used, never for long: `put` is called on the event loop."""
        self._pending: dict[str, tuple[str, Stored]] = {}
        """By id: (scope, response) of what is not on the disk yet."""
        try:
            self._connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
            try:
                self._count, self._bytes, self._used = self._prepared()
            except BaseException:
                self._connection.close()
                raise
        except sqlite3.DatabaseError as error:
            raise DamagedRecords(
                f"{path} cannot be opened ({error}); check its permissions, or move it away to start afresh."
            ) from error
        self._writer = ThreadPoolExecutor(1, "trunkline-responses")

    def _prepared(self) -> tuple[int, int, int]:
        """Make the tables, if they are not there; (how many responses there are, their bytes, the latest use)."""
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
            self._connection.execute(f"PRAGMA {pragma}")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise NewerSchema(
                f"the stored responses have schema {version}, this version reads up to {SCHEMA_VERSION}; "
                "upgrade trunkline or choose another --data-dir."
            )
        self._connection.executescript(f"{SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
        sums = "SELECT count(*), coalesce(sum(bytes), 0), coalesce(max(used), 0) FROM responses"
        count, size, used = self._connection.execute(sums).fetchone()
        return count, size, used

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything."""
        return self._max_bytes > 0

    def put(self, scope: str, stored: Stored) -> None:
        """Keep a response."""
        with self._memory:
            self._pending[stored.id] = scope, stored
        self._writer.submit(self._write, scope, stored)

    def get(self, scope: str, id: str) -> Stored | None:
        """One response."""
        with self._memory:
            pending = self._pending.get(id)
        if pending is not None:
            return pending[1] if pending[0] == scope else None
        with self._disk:
            row = self._connection.execute(
                "SELECT previous, input, document FROM responses JOIN contents USING (key) WHERE id = ? AND scope = ?",
                (id, scope),
            ).fetchone()
        return None if row is None else Stored(id, row[0], _decode_items(row[1]), row[2])

    def item(self, scope: str, id: str) -> Item | None:
        """One item that some stored response put out."""
        with self._memory:
            held = [stored for owner, stored in self._pending.values() if owner == scope]
        with self._disk:
            row = self._connection.execute(
                "SELECT responses.id FROM items JOIN responses USING (key) WHERE items.id = ? AND scope = ?",
                (id, scope),
            ).fetchone()
        found = self.get(scope, row[0]) if row is not None else None
        for stored in held if found is None else [found]:
            for item in stored.output():
                if item.id == id:
                    return item
        return None

    def chain(self, scope: str, id: str) -> list[Stored] | str:
        """The response and all that it stands on, oldest first; or the id that is missing."""
        found: list[Stored] = []
        at: str | None = id
        while at is not None:
            stored = self.get(scope, at)
            if stored is None:
                return at
            found.append(stored)
            at = stored.previous
        return found[::-1]

    def delete(self, scope: str, id: str) -> bool:
        """Forget a response; whether there was one. Returns once it is gone from the disk."""
        gone: Future[bool] = self._writer.submit(self._delete, scope, id)
        return gone.result()

    def close(self) -> None:
        """Write what is left."""
        self._writer.shutdown()
        self._connection.close()

    # --- the writer's thread -----------------------------------------------------------------------------------

    def _write(self, scope: str, stored: Stored) -> None:
        encoded = _encode_items(stored.input)
        size = len(encoded) + len(stored.document)
        try:
            if size <= self._max_bytes:
                with self._disk:
                    self._insert(scope, stored, encoded, size)
        except sqlite3.Error:
            log.exception("the response %s is not stored; free space or fix the data directory", stored.id)
        finally:
            with self._memory:
                del self._pending[stored.id]

    def _insert(self, scope: str, stored: Stored, encoded: bytes, size: int) -> None:
        self._used += 1
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            cursor = self._connection.execute(
                "INSERT INTO responses (id, scope, previous, used, bytes) VALUES (?,?,?,?,?)",
                (stored.id, scope, stored.previous, self._used, size),
            )
            self._connection.execute(
                "INSERT INTO contents VALUES (?,?,?)", (cursor.lastrowid, encoded, stored.document)
            )
            for item in stored.output():
                self._connection.execute("INSERT OR REPLACE INTO items VALUES (?,?)", (item.id, cursor.lastrowid))
            if stored.previous is not None:
                self._connection.execute(TOUCH, (stored.previous, self._used))
            kept = self._pruned(self._count + 1, self._bytes + size)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._count, self._bytes = kept

    def _pruned(self, count: int, size: int) -> tuple[int, int]:
        """Delete what was used longest ago until `count` and `size` are within bounds; returns both."""
        while count > self._max_count or size > self._max_bytes:
            key, freed = self._connection.execute(
                "SELECT key, bytes FROM responses ORDER BY used, key LIMIT 1"
            ).fetchone()
            self._connection.execute("DELETE FROM responses WHERE key = ?", (key,))
            count, size = count - 1, size - freed
        return count, size

    def _delete(self, scope: str, id: str) -> bool:
        with self._disk:
            row = self._connection.execute(
                "DELETE FROM responses WHERE id = ? AND scope = ? RETURNING bytes", (id, scope)
            ).fetchone()
            if row is None:
                return False
            self._count, self._bytes = self._count - 1, self._bytes - row[0]
            return True


def conversation(chain: Sequence[Stored]) -> list[Item]:
    """The items of a whole chain."""
    return [item for stored in chain for item in stored.items()]
