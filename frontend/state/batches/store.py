"""Batches: all batches of the engine, in the database of its state folder.

A change of status is on the disk when the call returns. Answers and tokens may be lost with the power, and are computed
again. A batch of another owner does not exist for a caller.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from ....ipc.messages.intake import BatchChecked
from ...forms.openai.batches.batch import BatchError, BatchUsage, Status
from .lines import (
    EndedLine,
    LineEnd,
    LineTokens,
    OpenLine,
    add_lines,
    add_tokens,
    close_lines,
    delete_lines,
    end_line,
    ended_lines,
    open_lines,
    take_over,
)
from .record import MAX_FAULTS, BatchRecord

T = TypeVar("T")

MAX_OPEN = 100  # batches of one owner that are not over
NUM_DELETED = 1000  # lines in one transaction, so that others wait for it only briefly
_FIELDS = "number, owner, record"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BatchRecord).decode


class BatchDatabase(Protocol):
    """The part of Database that is used here."""

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T: ...

    async def do(
        self, work: Callable[[sqlite3.Connection], T], *, synced: bool = False, is_deleting: bool = False
    ) -> T: ...


class StoredBatch(NamedTuple):
    """A batch and its number in the database."""

    number: int
    owner: bytes
    record: BatchRecord


class LineOutcome(NamedTuple):
    """The end of a line, and its tokens, which the batch counts."""

    end: LineEnd
    usage: BatchUsage
    model: str | None


class BatchPage(NamedTuple):
    """Some batches, newest first, and whether there are more."""

    batches: list[StoredBatch]
    has_more: bool


class Batches:
    """Store of batches and their lines. The calls of one frontend take effect in order."""

    def __init__(self, database: BatchDatabase, wall_time: Callable[[], float] = time.time) -> None:
        self._database, self._wall_time = database, wall_time

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def add(self, owner: bytes, record: BatchRecord) -> bool:
        """Add a batch; return False, with nothing changed, if its owner has MAX_OPEN open ones."""

        def work(database: sqlite3.Connection) -> bool:
            query = "SELECT COUNT(*) FROM batches WHERE owner = ? AND is_open"
            if database.execute(query, (owner,)).fetchone()[0] >= MAX_OPEN:
                return False
            batch = record.batch
            values = (batch.id, owner, True, batch.status, batch.input_file_id, _encode(record))
            columns = "id, owner, is_open, status, input_file_id, record"
            database.execute(f"INSERT INTO batches ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)
            return True

        return await self._database.do(work, synced=True)

    async def get(self, owner: bytes, batch_id: str) -> StoredBatch | None:
        return await self._database.read(partial(_find, owner=owner, batch_id=batch_id))

    async def page(self, owner: bytes, after: str | None, limit: int) -> BatchPage | None:
        """Return the owner's batches that are older than `after`, newest first; None if there is no such batch."""

        def work(database: sqlite3.Connection) -> BatchPage | None:
            below = 1 << 62
            if after is not None:
                found = _find(database, owner, after)
                if found is None:
                    return None
                below = found.number
            query = f"SELECT {_FIELDS} FROM batches WHERE owner = ? AND number < ? ORDER BY number DESC LIMIT ?"
            rows = database.execute(query, (owner, below, limit + 1)).fetchall()
            return BatchPage([_stored(row) for row in rows[:limit]], len(rows) > limit)

        return await self._database.read(work)

    async def cancel(self, owner: bytes, batch_id: str) -> StoredBatch | None:
        """Let a batch end with its present answers, and return it; None if there is none. IllegalMove if it is over or
        about to be."""

        def work(database: sqlite3.Connection) -> StoredBatch | None:
            found = _find(database, owner, batch_id)
            if found is not None and found.record.batch.status != "cancelling":
                found.record.move("cancelling", self._wall_time())
                _write(database, found)
            return found

        return await self._database.do(work, synced=True, is_deleting=True)  # it must work on a full disk, too

    # ── the runner ───────────────────────────────────────────────────────────────────────────────────────────────

    async def open_batches(self) -> list[StoredBatch]:
        """Return the batches that are not over, oldest first."""
        query = f"SELECT {_FIELDS} FROM batches WHERE is_open ORDER BY number"
        return await self._database.read(lambda database: [_stored(row) for row in database.execute(query)])

    async def add_checked(self, number: int, begin: int, checked: BatchChecked) -> bool:
        """Add the lines of a part of the input file, from `begin` on. After the last part, or with MAX_FAULTS faults,
        the batch is in progress or has failed. Return whether it is still being validated; if not, or if the part is
        known, nothing changes."""

        def work(database: sqlite3.Connection) -> bool:
            found = _read(database, number)
            record = found.record
            if record.batch.status != "validating" or begin != record.check_offset:
                return record.batch.status == "validating"
            doubles = add_lines(database, number, checked.lines)
            faults = [BatchError(each.code, each.message, each.param, each.number) for each in checked.faults]
            faults += [
                BatchError(
                    "duplicate_custom_id",
                    f"custom_id {each.custom_id!r:.80} is that of an earlier line: give each line one of its own",
                    "custom_id",
                    each.number,
                )
                for each in doubles
            ]
            for fault in sorted(faults, key=lambda each: each.line or 0):
                record.add_fault(fault)
            record.check_offset, record.check_number = checked.offset, checked.number
            record.batch.request_counts.total += len(checked.lines) - len(doubles)
            if checked.is_end or record.num_faults >= MAX_FAULTS:
                self._end_validation(record)
            _write(database, found)
            return record.batch.status == "validating"

        return await self._database.do(work, synced=checked.is_end)

    def _end_validation(self, record: BatchRecord) -> None:
        counts = record.batch.request_counts
        if not counts.total and not record.num_faults:
            message = "the file holds no requests: write each as one line of JSON"
            record.add_fault(BatchError("empty_file", message))
        if record.num_faults:
            counts.total = 0
            record.move("failed", self._wall_time())
        else:
            record.move("in_progress", self._wall_time())

    async def fail(self, number: int, fault: BatchError) -> None:
        """Let a batch that is being validated fail."""

        def work(database: sqlite3.Connection) -> None:
            found = _read(database, number)
            if found.record.batch.status == "validating":
                found.record.add_fault(fault)
                self._end_validation(found.record)
                _write(database, found)

        await self._database.do(work, synced=True)

    async def open_lines(self, count: int, max_bytes: int) -> list[tuple[StoredBatch, OpenLine]]:
        """Open lines that wait, those of the oldest batch first, as `lines.open_lines`."""

        def work(database: sqlite3.Connection) -> list[tuple[StoredBatch, OpenLine]]:
            opened: list[tuple[StoredBatch, OpenLine]] = []
            num_bytes = 0
            for batch in _in_progress(database):
                if len(opened) >= count or num_bytes >= max_bytes:
                    break
                lines = open_lines(
                    database, batch.number, count - len(opened), max_bytes - num_bytes, self._wall_time()
                )
                opened += [(batch, line) for line in lines]
                num_bytes += sum(line.length for line in lines)
            return opened

        return await self._database.do(work)

    async def take_over(self) -> list[tuple[StoredBatch, OpenLine]]:
        """Return the open lines of an earlier frontend, and count that loss."""

        def work(database: sqlite3.Connection) -> list[tuple[StoredBatch, OpenLine]]:
            return [(batch, line) for batch in _in_progress(database) for line in take_over(database, batch.number)]

        return await self._database.do(work)

    async def read_bodies(self, lines: Sequence[tuple[Path | None, OpenLine]]) -> list[bytes | None]:
        """Return the bodies of lines in the input files at these paths; None if a file is not there."""
        return await self._database.read(lambda _: [_read_body(path, line) for path, line in lines])

    async def save(self, tokens: Sequence[LineTokens], outcomes: Sequence[LineOutcome]) -> bool:
        """Store new tokens and ends of lines. A batch whose last line ends is finalizing; return whether one is."""

        def work(database: sqlite3.Connection) -> bool:
            add_tokens(database, tokens)
            changed: dict[int, StoredBatch] = {}
            has_moved = False
            for outcome in outcomes:
                end = outcome.end
                if end_line(database, end):
                    batch = changed.get(end.batch) or _read(database, end.batch)
                    changed[end.batch] = batch
                    _count(batch.record, outcome)
            for batch in changed.values():
                if not batch.record.num_left and batch.record.batch.status == "in_progress":
                    batch.record.move("finalizing", self._wall_time())
                    has_moved = True
                _write(database, batch)
            return has_moved

        return await self._database.do(work)

    async def expire(self, number: int) -> None:
        """End a batch whose window is over. It is finalizing if it has lines. Does nothing if it is ending already."""

        def work(database: sqlite3.Connection) -> None:
            found = _read(database, number)
            record = found.record
            if record.batch.status not in ("validating", "in_progress"):
                return
            record.has_expired = True
            record.move("expired" if record.batch.status == "validating" else "finalizing", self._wall_time())
            _write(database, found)

        await self._database.do(work, synced=True)

    async def close_lines(self, number: int) -> None:
        """End the lines of a batch that have not ended; they count as failed."""

        def work(database: sqlite3.Connection) -> None:
            found = _read(database, number)
            found.record.batch.request_counts.failed += close_lines(database, number)
            _write(database, found)

        await self._database.do(work)

    async def ended_lines(self, number: int, after: int, count: int, max_bytes: int) -> list[EndedLine]:
        """Return ended lines of a batch, as `lines.ended_lines`."""
        return await self._database.read(lambda database: ended_lines(database, number, after, count, max_bytes))

    async def finish(self, number: int, output_file_id: str | None, error_file_id: str | None) -> None:
        """End a batch that is finalizing or cancelling, once its files are stored."""

        def work(database: sqlite3.Connection) -> None:
            found = _read(database, number)
            record = found.record
            status: Status = "expired" if record.has_expired else "completed"
            if record.batch.status == "cancelling":
                status = "cancelled"
            record.move(status, self._wall_time())
            record.batch.output_file_id, record.batch.error_file_id = output_file_id, error_file_id
            _write(database, found)

        await self._database.do(work, synced=True)

    async def delete_ended(self) -> bool:
        """Delete some lines of batches that are over. Return whether there may be more."""
        deleted = await self._database.do(lambda database: delete_lines(database, NUM_DELETED), is_deleting=True)
        return deleted == NUM_DELETED


def reader_of(database: sqlite3.Connection, file_id: str) -> str | None:
    """Return the id of a batch that still reads a file; None if there is none. Outputs are written without the input,
    so that on a full disk the input of a cancelled batch can make room for them."""
    query = "SELECT id FROM batches WHERE is_open AND status IN ('validating', 'in_progress') AND input_file_id = ?"
    row = database.execute(query, (file_id,)).fetchone()
    return None if row is None else str(row[0])


def _read_body(path: Path | None, line: OpenLine) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return os.pread(file.fileno(), line.length, line.offset)
    except OSError:
        return None


def _find(database: sqlite3.Connection, owner: bytes, batch_id: str) -> StoredBatch | None:
    query = f"SELECT {_FIELDS} FROM batches WHERE id = ? AND owner = ?"
    row = database.execute(query, (batch_id, owner)).fetchone()
    return None if row is None else _stored(row)


def _read(database: sqlite3.Connection, number: int) -> StoredBatch:
    return _stored(database.execute(f"SELECT {_FIELDS} FROM batches WHERE number = ?", (number,)).fetchone())


def _in_progress(database: sqlite3.Connection) -> list[StoredBatch]:
    query = f"SELECT {_FIELDS} FROM batches WHERE is_open AND status = 'in_progress' ORDER BY number"
    return [_stored(row) for row in database.execute(query)]


def _stored(row: tuple[int, bytes, bytes]) -> StoredBatch:
    number, owner, record = row
    return StoredBatch(number, owner, _decode(record))


def _write(database: sqlite3.Connection, batch: StoredBatch) -> None:
    record = batch.record
    database.execute(
        "UPDATE batches SET is_open = ?, status = ?, record = ? WHERE number = ?",
        (record.is_open, record.batch.status, _encode(record), batch.number),
    )


def _count(record: BatchRecord, outcome: LineOutcome) -> None:
    """Count an ended line in its batch."""
    counts, usage, more = record.batch.request_counts, record.batch.usage, outcome.usage
    if outcome.end.status == 200:
        counts.completed += 1
    else:
        counts.failed += 1
    record.batch.model = record.batch.model or outcome.model
    usage.input_tokens += more.input_tokens
    usage.input_tokens_details.cached_tokens += more.input_tokens_details.cached_tokens
    usage.output_tokens += more.output_tokens
    usage.output_tokens_details.reasoning_tokens += more.output_tokens_details.reasoning_tokens
    usage.total_tokens += more.total_tokens
