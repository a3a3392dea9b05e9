"""ResponseStore: stored responses, in one SQLite file of the engine's run directory, which all frontends share.

The store's own thread executes the SQL. The file outlives a frontend, and ends with the engine. Writes are not synced
to the disk: the kernel keeps the commits of a killed process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from .....ipc.errors import InternalError, Overloaded, TokenloomError
from .....ipc.process.descriptors import check_free
from .....ipc.shortages.failure import shortage_of
from .....ipc.shortages.threads import Threads
from .....ipc.spec.config.engine_spec import EngineSpec

T = TypeVar("T")

FILE = "responses.sqlite"
NUM_FILES = 4  # files that SQLite may have to open: database, log, index, folder
SPARE_BYTES = 1 << 20  # a disk with less free space counts as full
LOCK_S = 30.0  # longest wait for the transactions of other frontends
MAX_RECORD_BYTES = 4 << 20  # limit for a stored conversation: the event loop scans its top-level fields, 1 ms per MiB
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, created REAL, owner INT, is_open INT, is_background INT,
    items BLOB, request BLOB, response BLOB,
    event_bytes INT DEFAULT 0,
    num_bytes INT AS (length(items) + length(request) + length(response) + event_bytes) STORED
);
CREATE INDEX IF NOT EXISTS by_age ON responses (is_open, created, num_bytes);
CREATE TABLE IF NOT EXISTS events (
    id TEXT REFERENCES responses ON DELETE CASCADE, sequence INT, event BLOB, PRIMARY KEY (id, sequence)
);
"""
_FIELDS = "id, is_open, is_background, items, request, response, owner"


def boot_time() -> float:
    """Return the seconds since the machine booted, including suspensions. Nothing can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Record(NamedTuple):
    """Stored response and its conversation."""

    id: str
    is_open: bool  # queued or in progress, in the background
    is_background: bool
    items: bytes  # JSON list: the input, including earlier turns
    request: bytes  # the other fields of the body; empty unless is_background
    response: bytes
    owner: int = 0  # index of the frontend that generates or has generated it

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.request) + len(self.response)


class ResponseStore:
    """Bounded store of responses. Its calls take effect in order. They raise Overloaded if the disk is full or another
    resource has run out, and InternalError if SQLite fails otherwise.

    Invariant after each call: count and bytes are within their limits, except for bytes that open responses have added.
    """

    def __init__(self, spec: EngineSpec, owner: int = 0, clock: Callable[[], float] = boot_time) -> None:
        """`owner`: the index of this frontend. `clock`: seconds; a clock that all processes share and that never
        jumps."""
        self._owner, self._clock = owner, clock
        self.path = Path(spec.run_directory) / FILE
        config = spec.config
        self._max_bytes, self._max_count = config.response_store_bytes, config.response_store_count
        self._max_age_s = config.response_store_age_s
        self.is_on = self._max_bytes > 0
        self._thread = Threads(1, "responses")
        self._database: sqlite3.Connection | None = None  # used only by the thread

    async def add(self, record: Record) -> None:
        """Add a response with a new id, and delete the oldest ended ones until it fits.

        Overloaded, with nothing deleted, if it cannot fit."""

        def work(database: sqlite3.Connection) -> None:
            if not self._make_room(database, record.num_bytes):
                raise Overloaded("all responses that are kept are still being made: ask again later", retry_after_s=5)
            marks = "?, ?, ?, ?, ?, ?, ?, ?"
            values = (*record._replace(owner=self._owner), self._clock())
            database.execute(f"INSERT INTO responses ({_FIELDS}, created) VALUES ({marks})", values)

        await self._do(work)

    async def update(
        self, response_id: str, response: bytes, *, is_open: bool, first: int = 0, events: Sequence[bytes] = ()
    ) -> None:
        """Append events, numbered from `first`, to an open response, and replace the response unless `response` is
        empty.

        `is_open` False ends the response. Does nothing if no response with this id is open."""

        def work(database: sqlite3.Connection) -> None:
            changed = database.execute(
                "UPDATE responses SET is_open = :is_open, event_bytes = event_bytes + :event_bytes, "
                "request = iif(:is_open, request, x''), response = iif(length(:response), :response, response) "
                "WHERE id = :id AND is_open",
                {
                    "id": response_id,
                    "is_open": is_open,
                    "event_bytes": sum(map(len, events)),
                    "response": response,
                },
            )
            if changed.rowcount:
                rows = [(response_id, number, event) for number, event in enumerate(events, first)]
                database.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
                self._make_room(database, 0)

        await self._do(work)

    async def get(self, response_id: str) -> Record | None:
        if not self.is_on:
            return None
        query, oldest = f"SELECT {_FIELDS} FROM responses WHERE id = ? AND (is_open OR created >= ?)", self._oldest()
        row = await self._do(lambda database: database.execute(query, (response_id, oldest)).fetchone())
        return row and Record(*row)

    async def open_records(self) -> list[Record]:
        """Return the open responses that this frontend, or an earlier one with its index, has added; oldest first."""
        query, owner = f"SELECT {_FIELDS} FROM responses WHERE is_open AND owner = ? ORDER BY created", self._owner
        rows = await self._do(lambda database: database.execute(query, (owner,)).fetchall())
        return [Record(*row) for row in rows]

    async def events(self, response_id: str) -> list[bytes]:
        query = "SELECT event FROM events WHERE id = ? ORDER BY sequence"
        return [row[0] for row in await self._do(lambda database: database.execute(query, (response_id,)).fetchall())]

    async def delete(self, response_id: str) -> None:
        await self._do(lambda database: database.execute("DELETE FROM responses WHERE id = ?", (response_id,)))

    def close(self) -> None:
        """Wait for the pending calls and close the file."""

        def work() -> None:
            if self._database is not None:
                self._database.close()

        self._thread.submit(work)
        self._thread.shutdown()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._database is None:
                self._database = self._connect()
            with self._database:
                return work(self._database)
        except sqlite3.Error as error:
            raise self._failure(error) from None

    def _failure(self, error: sqlite3.Error) -> TokenloomError:
        """Return the error to raise for a failure of SQLite, which does not always say why it cannot open or extend its
        files."""
        cause: Exception = error
        match error.sqlite_errorcode & 0xFF:
            case sqlite3.SQLITE_FULL:
                cause = OSError(errno.ENOSPC, str(error))
            case sqlite3.SQLITE_NOMEM:
                cause = MemoryError()
            case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN:
                cause = self._shortage() or error
        what = f"responses cannot be kept in {self.path}"
        return shortage_of(cause, what) or InternalError(f"{what}: {error}")

    def _shortage(self) -> OSError | None:
        """Return an OSError if SQLite's files now lack descriptors or disk space, otherwise None."""
        try:
            check_free(NUM_FILES)
            status = os.statvfs(self.path.parent)
        except OSError as error:
            return error
        is_full = status.f_bavail * status.f_frsize < SPARE_BYTES
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if is_full else None

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, LOCK_S, isolation_level="IMMEDIATE")
        try:
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()  # the next call connects again and creates the missing tables
            raise
        return database

    def _oldest(self) -> float:
        return self._clock() - self._max_age_s

    def _make_room(self, database: sqlite3.Connection, num_bytes: int) -> bool:
        """Delete expired responses, and then the oldest ended ones until a record of `num_bytes` fits (0: no record).
        Return whether it fits."""
        database.execute("DELETE FROM responses WHERE NOT is_open AND created < ?", (self._oldest(),))
        count, total = database.execute("SELECT COUNT(*), TOTAL(num_bytes) FROM responses").fetchone()
        count, total = count + (num_bytes > 0), total + num_bytes
        oldest = database.execute("SELECT rowid, num_bytes FROM responses WHERE is_open = 0 ORDER BY created")
        with contextlib.closing(oldest):
            doomed = []
            while (count > self._max_count or total > self._max_bytes) and (row := oldest.fetchone()):
                doomed.append(row[:1])
                count, total = count - 1, total - row[1]
        database.executemany("DELETE FROM responses WHERE rowid = ?", doomed)
        return bool(count <= self._max_count and total <= self._max_bytes)
