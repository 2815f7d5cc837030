"""Run records: every turn that ended, kept in SQLite, and the promise that a record is visible when its response ends.

How the promise holds: the executor hands the row of *every* turn that ended to `RunRecords.turn` (its sink) before it
emits `Ended`, also when the client is gone. The gateway, on `Ended`, awaits `committed()`, which returns once all that
was handed over before it is durable; only then does it send the response's last bytes. One thread owns the writing
connection and commits in groups: whatever arrived while the last commit ran goes into the next one.
"""

import logging
import queue
import time
from asyncio import wrap_future
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread

from trunkline.core.types import RunKey, RunOrigin
from trunkline.gateway.identity import scope_of
from trunkline.gateway.rundb import INSERT_TURN, OpenRun, RunReader, connect, lock_beside, turn_values
from trunkline.wire.records import RunRow, RunView, TurnRow

log = logging.getLogger("trunkline.records")

GROUP = 1024
"""Most operations in one commit."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """A turn of this run was accepted: make the run if it is new, open it again if it was finished."""

    key: RunKey
    parent: str | None
    origin: str
    session: str | None
    at: float


@dataclass(frozen=True, slots=True)
class _Turn:
    key: RunKey
    parent: str | None
    origin: str
    row: TurnRow


@dataclass(frozen=True, slots=True)
class _Declare:
    """`created` gets whether the run is new."""

    key: RunKey
    parent: str | None
    name: str | None
    objective: str | None
    expected_turns: int | None
    at: float
    created: "Future[bool]"


@dataclass(frozen=True, slots=True)
class _Finish:
    key: RunKey


@dataclass(frozen=True, slots=True)
class _Committed:
    done: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Operation = _Begin | _Turn | _Declare | _Finish | _Committed | _Close


class RunRecords:
    """The records of one server. Writes may come from any thread; reads block on the disk (call them off the loop).

    `path` None keeps the records in memory. Beyond `max_runs`, the oldest finished runs go first, then the oldest idle
    ones. A write that fails (disk full) is logged and counted in `lost`; serving goes on. Raises `RecordsError` when
    the file is locked by a live process, written by a later version, or damaged.
    """

    def __init__(self, path: Path | None, *, max_runs: int = 10_000) -> None:
        assert max_runs > 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.lost = 0
        self._lock_file = None if path is None else lock_beside(path)
        self._max_runs = max_runs
        self._observers: list[Callable[[TurnRow], None]] = []
        self._queue: queue.SimpleQueue[_Operation] = queue.SimpleQueue()
        self._keys: dict[RunKey, int] = {}
        """Rows of runs seen before, so that a turn costs two statements (each hands the interpreter lock around)."""
        try:
            self._connection = connect(path)
            self._write_lock = Lock()
            # Readers of a file have a connection of their own, so that a long list never holds up a commit.
            self._reader = RunReader(connect(path), Lock()) if path else RunReader(self._connection, self._write_lock)
            self._run_count = self._count_runs()
        except BaseException:
            if self._lock_file is not None:
                self._lock_file.close()
            raise
        self._thread = Thread(target=self._write_loop, name="trunkline-records", daemon=True)
        self._thread.start()

    # --- writes ------------------------------------------------------------------------------------------------

    def turn(self, salt: str, run: str, parent: str | None, origin: str, row: TurnRow) -> None:
        """The executor's sink: a turn ended. Thread-safe, never blocks."""
        self._queue.put(_Turn(RunKey(salt, run), parent, origin, row))

    def begin(self, key: RunKey, parent: str | None, origin: str, session: str | None = None) -> None:
        """A turn of this run was accepted, so that the run is listed while its first turn runs."""
        self._queue.put(_Begin(key, parent, origin, session, time.time()))

    async def declare(
        self,
        key: RunKey,
        *,
        parent: str | None = None,
        name: str | None = None,
        objective: str | None = None,
        expected_turns: int | None = None,
    ) -> bool:
        """Note a run before its first turn. False, and nothing changed, if its id is taken in its salt."""
        created: Future[bool] = Future()
        self._queue.put(_Declare(key, parent, name, objective, expected_turns, time.time(), created))
        return await wrap_future(created)

    def finish(self, key: RunKey) -> None:
        """The run is over."""
        self._queue.put(_Finish(key))

    async def committed(self) -> None:
        """Return once everything handed over before this call is durable (or counted as lost)."""
        done: Future[None] = Future()
        self._queue.put(_Committed(done))
        await wrap_future(done)

    def subscribe(self, observer: Callable[[TurnRow], None]) -> None:
        """Call `observer` with every turn's row, on the writer's thread, before `committed` returns."""
        self._observers.append(observer)

    def close(self) -> None:
        """Write what is left and give the file back."""
        self._queue.put(_Close())
        self._thread.join()
        self._reader.close()
        self._connection.close()
        if self._lock_file is not None:
            self._lock_file.close()

    # --- reads -------------------------------------------------------------------------------------------------

    def locate(self, scope: str | None, run: str) -> RunKey | None:
        """As `RunReader.locate`."""
        return self._reader.locate(scope, run)

    def runs(self, scope: str | None, limit: int, before: str | None = None) -> list[RunRow]:
        """As `RunReader.runs`."""
        return self._reader.runs(scope, limit, before)

    def run(self, scope: str | None, run: str) -> RunView | None:
        """As `RunReader.run`."""
        return self._reader.run(scope, run)

    def all_open_runs(self) -> list[OpenRun]:
        """The runs to tell the core about after a restart."""
        return self._reader.open_runs()

    # --- the writer's thread -----------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        closing = False
        while not closing:
            group = [self._queue.get()]
            while len(group) < GROUP and not self._queue.empty():
                group.append(self._queue.get())
            closing = any(isinstance(operation, _Close) for operation in group)
            self._commit(group)

    def _commit(self, group: list[_Operation]) -> None:
        created: dict[int, bool] = {}
        failure: Exception | None = None
        try:
            with self._write_lock:
                created = self._write(group)
        except Exception as error:
            failure = error
            self.lost += sum(isinstance(operation, _Turn) for operation in group)
            log.exception("records of %d operations are lost; free space or fix the data directory", len(group))
        for at, operation in enumerate(group):
            match operation:
                case _Turn(row=row):
                    self._observe(row)
                case _Declare(created=future) if future.set_running_or_notify_cancel():
                    if failure is not None:
                        future.set_exception(failure)
                    else:
                        future.set_result(created[at])
                case _Committed(done=done) if done.set_running_or_notify_cancel():
                    done.set_result(None)

    def _observe(self, row: TurnRow) -> None:
        for observer in self._observers:
            try:
                observer(row)
            except Exception:  # a failing observer must not stop the thread that everybody's responses wait for
                log.exception("an observer of turn records failed")

    def _write(self, group: list[_Operation]) -> dict[int, bool]:
        """One transaction. Returns, by position in `group`, whether a declared run is new."""
        if all(isinstance(operation, _Committed) for operation in group):
            return {}
        created: dict[int, bool] = {}
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for at, operation in enumerate(group):
                match operation:
                    case _Begin(key, parent, origin, session, when):
                        self._begin(self._run_key(key, parent, origin, when)[0], session, when)
                    case _Turn(key, parent, origin, row):
                        self._insert_turn(self._run_key(key, parent, origin, row.at)[0], row)
                    case _Declare():
                        created[at] = self._declare(operation)
                    case _Finish(key):
                        self._connection.execute("UPDATE runs SET finished = 1 WHERE salt = ? AND id = ?", key)
            self._prune()
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._keys.clear()
            self._run_count = self._count_runs()
            raise
        return created

    def _count_runs(self) -> int:
        (count,) = self._connection.execute("SELECT count(*) FROM runs").fetchone()
        return int(count)

    def _run_key(self, key: RunKey, parent: str | None, origin: str, at: float) -> tuple[int, bool]:
        """The run's row, made if it is new, and whether it was."""
        known = self._keys.get(key)
        if known is not None:
            return known, False
        cursor = self._connection.execute(
            "INSERT INTO runs (salt, id, scope, parent, origin, started_at, last_at) VALUES (?,?,?,?,?,?,?) "
            "ON CONFLICT DO NOTHING",
            (*key, scope_of(key.salt), parent, origin, at, at),
        )
        new = cursor.rowcount == 1
        self._run_count += new
        (row,) = self._connection.execute("SELECT key FROM runs WHERE salt = ? AND id = ?", key).fetchone()
        self._keys[key] = row
        return row, new

    def _begin(self, run: int, session: str | None, at: float) -> None:
        reopen = "UPDATE runs SET finished = 0, last_at = max(last_at, ?), session = coalesce(session, ?) WHERE key = ?"
        self._connection.execute(reopen, (at, session, run))

    def _declare(self, declared: _Declare) -> bool:
        run, new = self._run_key(declared.key, declared.parent, RunOrigin.HEADER, declared.at)
        if new:
            self._connection.execute(
                "UPDATE runs SET name = ?, objective = ?, expected_turns = ? WHERE key = ?",
                (declared.name, declared.objective, declared.expected_turns, run),
            )
        return new

    def _insert_turn(self, run: int, row: TurnRow) -> None:
        self._connection.execute(INSERT_TURN, (run, *turn_values(row)))
        self._connection.execute(
            "UPDATE runs SET turns = turns + 1, prompt_tokens = prompt_tokens + ?, cached_tokens = cached_tokens + ?, "
            "reusable_tokens = reusable_tokens + ?, completion_tokens = completion_tokens + ?, "
            "cost_usd = cost_usd + ?, last_prompt_tokens = ?, node = ?, last_at = max(last_at, ?) WHERE key = ?",
            (
                row.prompt_tokens,
                row.cached_tokens,
                row.reusable_tokens,
                row.completion_tokens,
                row.cost_usd,
                row.prompt_tokens,
                row.node,
                row.at + row.latency_ms / 1000,
                run,
            ),
        )

    def _prune(self) -> None:
        """Delete runs beyond the bound, a twentieth at a time."""
        if self._run_count <= self._max_runs:
            return
        excess = self._run_count - self._max_runs + self._max_runs // 20
        self._connection.execute(
            "DELETE FROM runs WHERE key IN (SELECT key FROM runs ORDER BY finished DESC, last_at, key LIMIT ?)",
            (excess,),
        )
        self._run_count = self._count_runs()
        self._keys.clear()
