"""ResponseStore: stored responses and their events, in the database that all frontends share."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from ...ipc.errors import Overloaded
from ...ipc.spec.config.engine_config import EngineConfig
from .database import Database

MAX_RECORD_BYTES = 4 << 20  # limit for a stored conversation: the event loop scans its top-level fields, 1 ms per MiB
_FIELDS = "id, is_open, is_background, items, request, response, owner"


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
    """Bounded store of responses, with the errors of its database.

    Invariant after each call: count and bytes are within their limits, except for bytes that open responses have added.
    """

    def __init__(self, database: Database, config: EngineConfig, owner: int = 0) -> None:
        """`owner`: the index of this frontend."""
        self._database, self._owner, self._num_owners = database, owner, config.api_server_count
        self._max_bytes, self._max_count = config.response_store_bytes, config.response_store_count
        self._max_age_s = config.response_store_age_s
        self.is_on = self._max_bytes > 0

    @property
    def exists(self) -> bool:
        """Whether an earlier frontend may have stored something."""
        return self._database.path.exists()

    async def add(self, record: Record) -> None:
        """Add a response with a new id, and delete the oldest ended ones until it fits.

        Overloaded, with nothing deleted, if it cannot fit."""

        def work(database: sqlite3.Connection) -> None:
            if not self._make_room(database, record.num_bytes):
                raise Overloaded("all responses that are kept are still being made: ask again later", retry_after_s=5)
            marks = "?, ?, ?, ?, ?, ?, ?, ?"
            values = (*record._replace(owner=self._owner), self._database.clock.now())
            database.execute(f"INSERT INTO responses ({_FIELDS}, created) VALUES ({marks})", values)

        await self._database.do(work)

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

        await self._database.do(work)

    async def set_request(self, response_id: str, request: bytes) -> None:
        """Replace the request of a response; do nothing if no response with this id is open."""
        query = "UPDATE responses SET request = ? WHERE id = ? AND is_open"
        await self._database.do(lambda database: database.execute(query, (request, response_id)))

    async def get(self, response_id: str) -> Record | None:
        if not self.is_on:
            return None
        query = f"SELECT {_FIELDS} FROM responses WHERE id = ? AND (is_open OR created >= ?)"
        row = await self._database.read(
            lambda database: database.execute(query, (response_id, self._oldest())).fetchone()
        )
        return row and Record(*row)

    async def take_open(self) -> list[Record]:
        """Make this frontend the owner of the open responses that an earlier one with its index has added, and of its
        share of those of frontends that the engine no longer has; return them, oldest first."""

        def work(database: sqlite3.Connection) -> list[Record]:
            given = {"owner": self._owner, "count": self._num_owners}
            database.execute(
                "UPDATE responses SET owner = :owner WHERE is_open AND owner >= :count AND owner % :count = :owner",
                given,
            )
            query = f"SELECT {_FIELDS} FROM responses WHERE is_open AND owner = :owner ORDER BY created"
            return [Record(*row) for row in database.execute(query, given)]

        return await self._database.do(work)

    async def events(self, response_id: str) -> list[bytes]:
        query = "SELECT event FROM events WHERE id = ? ORDER BY sequence"
        rows = await self._database.read(lambda database: database.execute(query, (response_id,)).fetchall())
        return [row[0] for row in rows]

    async def delete(self, response_id: str) -> None:
        query = "DELETE FROM responses WHERE id = ?"
        await self._database.do(lambda database: database.execute(query, (response_id,)), is_deleting=True)

    def _oldest(self) -> float:
        return self._database.clock.now() - self._max_age_s

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
