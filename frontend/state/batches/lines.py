"""The lines of batches in the database: each is WAITING, then OPEN while its request runs, then ENDED, once.

Functions of a connection, inside the caller's transaction. They do not know the statuses of batches.
"""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from ....ipc.messages.intake import FoundLine


class LineState(enum.IntEnum):
    """State of a line."""

    WAITING = 0
    OPEN = 1
    ENDED = 2


_FIELDS = "batch, number, offset, length, custom_id, opened, losses, seed, num_cached, tokens"


class OpenLine(NamedTuple):
    """A line with a request that runs."""

    batch: int  # the batch's number in the database
    number: int
    offset: int  # of the body in the input file
    length: int
    custom_id: str
    opened: float  # unix seconds
    losses: int  # of frontends with it, since its last new token
    seed: int  # of the request, as soon as it has tokens
    num_cached: int  # tokens of its prompts that were in the prefix cache
    tokens: bytes  # those of its answer, as the HTTP journal encodes them


class LineTokens(NamedTuple):
    """New tokens of an open line."""

    batch: int
    number: int
    seed: int
    num_cached: int
    tokens: bytes


class LineEnd(NamedTuple):
    """The outcome of a line."""

    batch: int
    number: int
    status: int  # of HTTP; 0: there is no answer
    answer: bytes  # the line of an output file


class EndedLine(NamedTuple):
    """An ended line, for the output files."""

    number: int
    custom_id: str
    status: int
    answer: bytes  # empty: it never ran


def add_lines(database: sqlite3.Connection, batch: int, lines: Iterable[FoundLine]) -> list[FoundLine]:
    """Add lines that wait. Return those whose custom_id another line of the batch has; they are not added."""
    doubles: list[FoundLine] = []
    for line in lines:
        values = (batch, line.number, line.offset, line.length, line.custom_id)
        added = database.execute(
            "INSERT OR IGNORE INTO lines (batch, number, offset, length, custom_id) VALUES (?, ?, ?, ?, ?)", values
        )
        if not added.rowcount:
            doubles.append(line)
    return doubles


def open_lines(database: sqlite3.Connection, batch: int, count: int, max_bytes: int, now: float) -> list[OpenLine]:
    """Open the first lines that wait: at most `count`, and no more after `max_bytes` of bodies. `now`: unix seconds."""
    waiting = database.execute(
        f"SELECT {_FIELDS} FROM lines WHERE batch = ? AND state = ? ORDER BY number LIMIT ?",
        (batch, LineState.WAITING, count),
    )
    opened: list[OpenLine] = []
    num_bytes = 0
    for row in waiting.fetchall():
        if num_bytes >= max_bytes:
            break
        line = OpenLine(*row)._replace(opened=now)
        database.execute(
            "UPDATE lines SET state = ?, opened = ? WHERE batch = ? AND number = ? AND state = ?",
            (LineState.OPEN, now, batch, line.number, LineState.WAITING),
        )
        opened.append(line)
        num_bytes += line.length
    return opened


def take_over(database: sqlite3.Connection, batch: int) -> list[OpenLine]:
    """Return the open lines, which an earlier frontend has left, and count that loss."""
    database.execute("UPDATE lines SET losses = losses + 1 WHERE batch = ? AND state = ?", (batch, LineState.OPEN))
    query = f"SELECT {_FIELDS} FROM lines WHERE batch = ? AND state = ? ORDER BY number"
    return [OpenLine(*row) for row in database.execute(query, (batch, LineState.OPEN))]


def add_tokens(database: sqlite3.Connection, tokens: Iterable[LineTokens]) -> None:
    """Add tokens to lines that are open; lines that have ended meanwhile stay as they are."""
    database.executemany(
        "UPDATE lines SET seed = ?, num_cached = ?, tokens = CAST(tokens || ? AS BLOB), losses = 0 "
        "WHERE batch = ? AND number = ? AND state = ?",
        [(each.seed, each.num_cached, each.tokens, each.batch, each.number, LineState.OPEN) for each in tokens],
    )


def end_line(database: sqlite3.Connection, end: LineEnd) -> bool:
    """End a line; return False, with nothing changed, unless it is open."""
    changed = database.execute(
        "UPDATE lines SET state = ?, status = ?, answer = ?, tokens = x'' WHERE batch = ? AND number = ? AND state = ?",
        (LineState.ENDED, end.status, end.answer, end.batch, end.number, LineState.OPEN),
    )
    return changed.rowcount > 0


def close_lines(database: sqlite3.Connection, batch: int) -> int:
    """End all lines that have not ended, without answers; return their number."""
    changed = database.execute(
        "UPDATE lines SET state = ?, status = 0, answer = x'', tokens = x'' WHERE batch = ? AND state <> ?",
        (LineState.ENDED, batch, LineState.ENDED),
    )
    return changed.rowcount


def ended_lines(database: sqlite3.Connection, batch: int, after: int, count: int, max_bytes: int) -> list[EndedLine]:
    """Return the first ended lines after a line number: at most `count`, and no more after `max_bytes` of answers."""
    query = "SELECT number, custom_id, status, answer FROM lines WHERE batch = ? AND state = ? AND number > ?"
    rows = database.execute(f"{query} ORDER BY number LIMIT ?", (batch, LineState.ENDED, after, count))
    found: list[EndedLine] = []
    num_bytes = 0
    for row in rows:
        found.append(EndedLine(*row))
        num_bytes += len(found[-1].answer)
        if num_bytes >= max_bytes:
            break
    rows.close()
    return found


def delete_lines(database: sqlite3.Connection, count: int) -> int:
    """Delete at most `count` lines of batches that are over; return how many."""
    over = "SELECT number FROM batches WHERE NOT is_open"
    query = f"SELECT rowid FROM lines WHERE batch IN ({over}) LIMIT ?"
    return database.execute(f"DELETE FROM lines WHERE rowid IN ({query})", (count,)).rowcount
