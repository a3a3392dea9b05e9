"""Files: uploads of clients and outputs of batches, as plain files with one row each.

A file is written beside its place, synced and renamed; then its row is committed. So a row always has its whole file.
A file without a row belongs to a writer, which holds a flock on it, or is left of one that was killed: `sweep` removes
it then.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from ...ipc.errors import RequestError, TokenloomError
from ...ipc.shortages.threads import Threads
from .contents import FileReader, PartFile, file_names, remove, take_leftover
from .database import Database
from .failures import state_failure
from .room import ROW_SPARE_BYTES, UPLOAD_SPARE_BYTES

T = TypeVar("T")
Holder: TypeAlias = Callable[[sqlite3.Connection, str], str | None]  # names the holder of a file, if it has one

NUM_THREADS = 2  # that read and write contents
OUTPUT_S = 30 * 86400  # life of a batch's output, unless its maker says otherwise
PIECE_BYTES = 1 << 20  # that are written at a time
_FIELDS = "id, owner, num_bytes, created_at, expires_at, filename, purpose"
_DELETE = "DELETE FROM files WHERE id = ?"
_LIVES = "(expires IS NULL OR expires > :now)"


class FileRecord(NamedTuple):
    """A stored file. Times are wall time in unix seconds, as clients see them."""

    id: str
    owner: bytes  # digest of the key that has made it; empty: made without a key
    num_bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str


class Description(NamedTuple):
    """The fields of a file that its maker chooses. `expires_s`: its life; None: until it is deleted."""

    filename: str
    purpose: str
    expires_s: int | None


class Page(NamedTuple):
    """Some files in order, and whether more follow."""

    records: list[FileRecord]
    has_more: bool


class FileHeld(Exception):
    """A file cannot be deleted, since something still reads it."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class QuotaExceeded(Exception):
    """The files of one owner would have more bytes than it may store."""


class Files:
    """Store of files. A file of another owner does not exist for a caller. Errors are those of the database, and
    StorageFull if the disk is full."""

    def __init__(self, database: Database, folder: Path, quota_bytes: int, holders: Sequence[Holder] = ()) -> None:
        """`quota_bytes`: of the files of one owner. `holders` are asked, in the transaction, before a file goes."""
        self._database, self._folder, self._quota_bytes = database, folder, quota_bytes
        self._holders = holders
        self._threads = Threads(NUM_THREADS, "files")

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin(self, owner: bytes, file_id: str, description: Description | None = None) -> FileWriter:
        """Return the writer of a new file, in place of one with this id. QuotaExceeded if the owner has no bytes
        left."""
        left = await self._database.read(lambda database: self._num_left(database, owner, file_id))
        if left <= 0:
            raise self.exceeded()
        return FileWriter(self, await self._begin(file_id, UPLOAD_SPARE_BYTES), owner, description, left)

    async def create_output(self, owner: bytes, file_id: str, name: str, expires_s: int | None) -> FileWriter:
        """Return the writer of a file of purpose batch_output, which the quota counts and does not refuse, in place of
        one with this id. `expires_s`: its life; None: OUTPUT_S."""
        description = Description(name, "batch_output", OUTPUT_S if expires_s is None else expires_s)
        return FileWriter(self, await self._begin(file_id, ROW_SPARE_BYTES), owner, description, None)

    async def _begin(self, file_id: str, spare_bytes: int) -> PartFile:
        """Begin the content of a file. One with this id is gone then: it could be found with the new content."""
        if await self._has_row(file_id):
            await self._database.do(lambda database: database.execute(_DELETE, (file_id,)), synced=True)
        beginning = asyncio.ensure_future(self.in_thread(PartFile, self._folder, file_id, spare_bytes))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:  # the thread goes on, and nobody would close its file
            with contextlib.suppress(TokenloomError):
                (await beginning).remove()
            raise

    async def add(self, record: FileRecord, expires_s: int | None, *, is_limited: bool) -> None:
        """Add the row of a file that is in its place."""

        def work(database: sqlite3.Connection) -> None:
            if is_limited and record.num_bytes > self._num_left(database, record.owner, record.id):
                raise self.exceeded()
            expires = None if expires_s is None else self._database.clock.now() + expires_s
            database.execute("DELETE FROM files WHERE id = ?", (record.id,))
            database.execute(
                f"INSERT INTO files ({_FIELDS}, expires) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*record, expires)
            )

        await self._database.do(work, synced=True)

    def _num_left(self, database: sqlite3.Connection, owner: bytes, file_id: str) -> int:
        query = "SELECT TOTAL(num_bytes) FROM files WHERE owner = ? AND id != ?"
        return self._quota_bytes - int(database.execute(query, (owner, file_id)).fetchone()[0])

    def exceeded(self) -> QuotaExceeded:
        """Return the error for a file that does not fit into its owner's quota."""
        return QuotaExceeded(
            f"the files of this key may have {self._quota_bytes} bytes together: delete some, or raise "
            "--file-quota-bytes"
        )

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, owner: bytes, file_id: str) -> FileRecord | None:
        query = f"SELECT {_FIELDS} FROM files WHERE id = :id AND owner = :owner AND {_LIVES}"

        def work(database: sqlite3.Connection) -> FileRecord | None:
            given = {"id": file_id, "owner": owner, "now": self._database.clock.now()}
            row = database.execute(query, given).fetchone()
            return row and FileRecord(*row)

        return await self._database.read(work)

    async def input_path(self, owner: bytes, file_id: str) -> Path | None:
        """Return the path of a file of purpose batch; None if there is none. A file that has expired is still there if
        it is held."""
        query = "SELECT 1 FROM files WHERE id = ? AND owner = ? AND purpose = 'batch'"
        found = await self._database.read(lambda database: database.execute(query, (file_id, owner)).fetchone())
        return self._folder / file_id if found else None

    async def page(
        self, owner: bytes, after: str | None, limit: int, *, is_ascending: bool, purpose: str | None
    ) -> Page:
        """Return up to `limit` files behind file `after`, by age. RequestError if `after` is not a file of the
        owner."""

        def work(database: sqlite3.Connection) -> Page:
            given = {"owner": owner, "purpose": purpose, "now": self._database.clock.now(), "limit": limit + 1}
            conditions = ["owner = :owner", _LIVES]
            if purpose is not None:
                conditions.append("purpose = :purpose")
            if after is not None:
                place = database.execute(
                    "SELECT number FROM files WHERE id = ? AND owner = ?", (after, owner)
                ).fetchone()
                if place is None:
                    raise RequestError(f"after is {after!r:.80}, which is not a file: give the id of one")
                given["after"] = place[0]
                conditions.append(f"number {'>' if is_ascending else '<'} :after")
            query = f"SELECT {_FIELDS} FROM files WHERE {' AND '.join(conditions)} ORDER BY number"
            order = "ASC" if is_ascending else "DESC"
            rows = database.execute(f"{query} {order} LIMIT :limit", given).fetchall()
            return Page([FileRecord(*row) for row in rows[:limit]], len(rows) > limit)

        return await self._database.read(work)

    async def open(self, record: FileRecord) -> FileReader:
        """Return the content of a file, to be closed."""
        return await self.in_thread(FileReader, self._folder / record.id)

    # ── removing ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def delete(self, owner: bytes, file_id: str) -> bool:
        """Delete a file; return whether there was one. FileHeld if something still reads it."""

        def work(database: sqlite3.Connection) -> bool:
            found = database.execute("SELECT 1 FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
            if found is None:
                return False
            if (holder := self._holder_of(database, file_id)) is not None:
                raise FileHeld(holder)
            database.execute(_DELETE, (file_id,))
            return True

        has_been = await self._database.do(work, synced=True, is_deleting=True)
        if has_been:
            await self.in_thread(remove, self._folder / file_id)
        return has_been

    async def sweep(self) -> None:
        """Remove files that have expired and are not held, and those that killed writers have left."""

        def expire(database: sqlite3.Connection) -> None:
            query = "SELECT id FROM files WHERE expires <= ?"
            ids = [row[0] for row in database.execute(query, (self._database.clock.now(),)).fetchall()]
            gone = [(each,) for each in ids if self._holder_of(database, each) is None]
            database.executemany(_DELETE, gone)

        await self._database.do(expire, synced=True, is_deleting=True)
        names = await self.in_thread(file_names, self._folder)  # first: a file is there before its row
        ids = await self._database.read(lambda database: {row[0] for row in database.execute("SELECT id FROM files")})
        for name, file_id, is_part in names:
            if is_part or file_id not in ids:
                await self._remove_leftover(self._folder / name, file_id, is_part=is_part)

    async def _remove_leftover(self, path: Path, file_id: str, *, is_part: bool) -> None:
        """Remove a file unless a writer holds it, or has given it a row."""
        left = await self.in_thread(take_leftover, path)
        if left is not None:
            try:
                if is_part or not await self._has_row(file_id):
                    await self.in_thread(left.remove)
            finally:
                left.close()

    def _holder_of(self, database: sqlite3.Connection, file_id: str) -> str | None:
        return next((name for holder in self._holders if (name := holder(database, file_id)) is not None), None)

    async def _has_row(self, file_id: str) -> bool:
        query = "SELECT 1 FROM files WHERE id = ?"
        return bool(await self._database.read(lambda database: database.execute(query, (file_id,)).fetchone()))

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Return the result of `work` in a thread; errors of the system become those of a shortage."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except OSError as error:
            raise state_failure(error, f"the folder {self._folder} cannot be used") from None

    def close(self) -> None:
        """Wait for the threads' work and end them."""
        self._threads.shutdown()


class FileWriter:
    """Writer of one file, which is there for clients once `finish` has returned."""

    def __init__(
        self, files: Files, part: PartFile, owner: bytes, description: Description | None, most_bytes: int | None
    ) -> None:
        """`description` may be set later, before `finish`. `most_bytes`: None if no quota limits it."""
        self.description = description
        self._files, self._part, self._owner, self._most_bytes = files, part, owner, most_bytes
        self._pieces: list[bytes] = []  # that are not written yet
        self._num_held = self._num_bytes = 0
        self._is_over = False

    async def write(self, data: bytes) -> None:
        """Append bytes. QuotaExceeded if they do not fit."""
        self._num_bytes += len(data)
        if self._most_bytes is not None and self._num_bytes > self._most_bytes:
            raise self._files.exceeded()
        self._pieces.append(data)
        self._num_held += len(data)
        if self._num_held >= PIECE_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        pieces = self._pieces
        self._pieces = []
        self._num_held = 0
        await self._files.in_thread(self._part.write, pieces)

    async def finish(self) -> FileRecord:
        """Store the file and return its record; both it and its row are on the disk then. Once begun, it ends even if
        the caller is cancelled."""
        await self._flush()
        self._is_over = True
        return await asyncio.shield(self._store())

    async def _store(self) -> FileRecord:
        description = self.description
        assert description is not None, "it is set before the end"
        created = int(time.time())
        expires_s = description.expires_s
        expires_at = None if expires_s is None else created + expires_s
        record = FileRecord(
            self._part.file_id,
            self._owner,
            self._num_bytes,
            created,
            expires_at,
            description.filename,
            description.purpose,
        )
        try:
            await self._files.in_thread(self._part.put_in_place)
            await self._files.add(record, expires_s, is_limited=self._most_bytes is not None)
        except BaseException:
            self._part.remove()
            raise
        self._part.close()
        return record

    def discard(self) -> None:
        """Remove the bytes that were written, unless `finish` was begun."""
        if not self._is_over:
            self._is_over = True
            self._part.remove()
