"""Database: one SQLite file that all frontends of an engine share. A thread of its own executes the SQL.

In a state folder the file outlives the engine and the machine's boot. Without one it is in the run directory, holds the
stored responses alone, and ends with the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...ipc.errors import InternalError, StorageFull, TokenloomError
from ...ipc.process.descriptors import check_free
from ...ipc.shortages.failure import shortage_of
from ...ipc.shortages.threads import Threads
from ...ipc.spec.config.engine_spec import EngineSpec
from .clock import StateClock
from .failures import state_failure
from .room import ROW_SPARE_BYTES, check_room
from .schema import FILE, TABLES, VERSION

T = TypeVar("T")

NUM_FILES = 4  # files that SQLite may have to open: database, log, index, folder
LOCK_S = 30.0  # longest wait for the transactions of other frontends


class Database:
    """Connection to the file, opened at the first call. Calls take effect in order, each in one transaction.

    A call raises StorageFull if the disk is full, Overloaded if another resource has run out, and InternalError if
    SQLite fails otherwise; then nothing has changed. The errors of `work` pass, and undo its changes too."""

    def __init__(self, path: Path, *, is_durable: bool, clock: StateClock | None = None) -> None:
        """`is_durable`: a commit may be lost only with the power, and if it is synced not even then. Otherwise no
        commit waits for the disk: the kernel keeps those of a killed process."""
        self.path = path
        self.clock = clock or StateClock()
        self._is_durable = is_durable
        self._thread = Threads(1, "state")
        self._connection: sqlite3.Connection | None = None  # used only by the thread
        self._identity = (0, 0)  # device and inode of the file that is open

    @classmethod
    def of_engine(cls, spec: EngineSpec) -> Database:
        """Return the database in the engine's state folder; without one, that in the run directory."""
        folder = spec.config.state_dir
        return cls(Path(folder or spec.run_directory) / FILE, is_durable=folder is not None)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work`, which changes nothing. It waits for no other process's transaction."""
        return await self._run(work, "DEFERRED", False)

    async def do(
        self, work: Callable[[sqlite3.Connection], T], *, synced: bool = False, is_deleting: bool = False
    ) -> T:
        """Return the result of `work`, during which no other process changes anything. If `synced`, its changes and all
        earlier ones are on the disk then. `is_deleting`: it adds nothing but some bytes of a row, and may use the room
        that others leave."""

        def checked(connection: sqlite3.Connection) -> T:
            self._check_room()
            return work(connection)

        return await self._run(work if is_deleting else checked, "IMMEDIATE", synced)

    def close(self) -> None:
        """Wait for the pending calls and close the file."""

        def work() -> None:
            if self._connection is not None:
                self._connection.close()

        self._thread.submit(work)
        self._thread.shutdown()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self, work: Callable[[sqlite3.Connection], T], kind: str, synced: bool) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work, kind, synced)

    def _transact(self, work: Callable[[sqlite3.Connection], T], kind: str, synced: bool) -> T:
        try:
            return self._committed(work, kind, synced)
        except StorageFull:
            self._empty_log()
            raise

    def _committed(self, work: Callable[[sqlite3.Connection], T], kind: str, synced: bool) -> T:
        try:
            if self._connection is None:
                self._connection = self._connect()
            connection = self._connection
            if self._is_durable:
                self._check_place()
                # in WAL mode one sync of the log covers the earlier commits, too
                connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            with connection:
                connection.execute(f"BEGIN {kind}")
                return work(connection)
        except sqlite3.Error as error:
            raise self._failure(error) from None

    def _empty_log(self) -> None:
        """Give the room of SQLite's log back to the disk, so that the next call finds it."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, LOCK_S, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {'NORMAL' if self._is_durable else 'OFF'}")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.executescript(TABLES)
            if connection.execute("PRAGMA user_version").fetchone() != (VERSION,):
                connection.execute(f"PRAGMA user_version = {VERSION}")
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                self.clock.begin(connection)
            self._identity = self._place()
        except (sqlite3.Error, TokenloomError):
            connection.close()  # the next call connects again and creates the missing tables
            raise
        return connection

    def _failure(self, error: sqlite3.Error) -> TokenloomError:
        """Return the error to raise for a failure of SQLite, which does not always say why it cannot open or extend its
        files."""
        cause: Exception = error
        match error.sqlite_errorcode & 0xFF:
            case sqlite3.SQLITE_FULL:
                cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case sqlite3.SQLITE_NOMEM:
                cause = MemoryError()
            case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN:
                cause = self._shortage() or error
        if isinstance(cause, OSError):
            return state_failure(cause, self._subject)
        return shortage_of(cause, self._subject) or InternalError(f"{self._subject}: {error}")

    def _check_room(self) -> None:
        """Raise StorageFull if the disk has no room for new rows."""
        try:
            check_room(self.path.parent, ROW_SPARE_BYTES)
        except OSError as error:
            raise state_failure(error, self._subject) from None

    def _place(self) -> tuple[int, int]:
        """Return the device and the inode of the file that has the database's name now."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise state_failure(error, self._subject) from None
        return found.st_dev, found.st_ino

    def _check_place(self) -> None:
        """Raise InternalError if the file is not the one that is open: what SQLite would write there, nobody would find
        again."""
        if self._place() != self._identity:
            raise InternalError(
                f"{self._subject}: another file has taken its place: stop the engine, put the folder back as it was, "
                "and start it again"
            )

    def _shortage(self) -> OSError | None:
        """Return an OSError if SQLite's files now lack descriptors or disk space, otherwise None."""
        try:
            check_free(NUM_FILES)
            check_room(self.path.parent, ROW_SPARE_BYTES)
        except OSError as error:
            return error
        return None

    @property
    def _subject(self) -> str:
        return f"nothing can be kept in {self.path}"
