"""StateUsage: how much the state folder holds."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

from .room import free_bytes

_QUERY = """
SELECT (SELECT COUNT(*) FROM files), (SELECT TOTAL(num_bytes) FROM files),
       (SELECT COUNT(*) FROM batches WHERE is_open), COUNT(*), TOTAL(is_open), TOTAL(num_bytes) FROM responses
"""


class StateUsage(NamedTuple):
    """Counts and bytes of all callers."""

    num_files: int = 0
    file_bytes: int = 0
    num_open_batches: int = 0
    num_responses: int = 0
    num_open_responses: int = 0  # that are being made in the background
    response_bytes: int = 0
    free_bytes: int = 0  # of the disk

    @classmethod
    def read(cls, database: sqlite3.Connection, folder: Path) -> StateUsage:
        """Return the present usage. OSError if the folder cannot be asked for its disk."""
        counts = [int(value) for value in database.execute(_QUERY).fetchone()]
        return cls._make([*counts, free_bytes(folder)])
