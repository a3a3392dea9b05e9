"""OpenRequests: how many HTTP requests a frontend has not answered to their end, in a file that outlives it.

The file is mapped: counting is a store to memory. When a frontend is killed the supervisor reads what it left, which
is the number of requests that were cut.
"""

from __future__ import annotations

import mmap
from pathlib import Path

_NUM_BYTES = 8


class OpenRequests:
    """One number in native byte order. Without a path it is this process's own."""

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._cells = memoryview(bytearray(_NUM_BYTES)).cast("q")
            return
        with path.open("w+b", buffering=0) as file:
            file.write(bytes(_NUM_BYTES))  # not a hole: a store to one could fail when the disk is full
            self._cells = memoryview(mmap.mmap(file.fileno(), _NUM_BYTES)).cast("q")

    def add(self, change: int) -> None:
        self._cells[0] += change

    @property
    def count(self) -> int:
        return self._cells[0]


def path_of(run_directory: str, identity: str) -> Path:
    """Where the frontend of this identity counts."""
    return Path(run_directory) / f"{identity}.requests"


def take_left(path: Path) -> int:
    """What a frontend that has ended left, whose file is removed; 0 if it never served HTTP."""
    try:
        data = path.read_bytes()
        path.unlink()
    except OSError:
        return 0
    return max(memoryview(data).cast("q")[0], 0) if len(data) == _NUM_BYTES else 0
