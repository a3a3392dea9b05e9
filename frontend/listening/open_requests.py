"""OpenRequests: a frontend's count of unfinished HTTP requests, in a file that outlives the frontend.

The file is memory-mapped, so that counting is one store. If a frontend is killed, the supervisor reads the count: it is
the number of interrupted requests.
"""

from __future__ import annotations

import mmap
from pathlib import Path

_NUM_BYTES = 8


class OpenRequests:
    """Count of unfinished HTTP requests, initially 0: a native int64 in a new file at `path`, or in memory without a
    path."""

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._cells = memoryview(bytearray(_NUM_BYTES)).cast("q")
            return
        with path.open("w+b", buffering=0) as file:
            file.write(bytes(_NUM_BYTES))  # no hole: a store to a hole can fail on a full disk
            self._cells = memoryview(mmap.mmap(file.fileno(), _NUM_BYTES)).cast("q")

    def add(self, change: int) -> None:
        self._cells[0] += change

    @property
    def count(self) -> int:
        return self._cells[0]


def path_of(run_directory: str, identity: str) -> Path:
    """Return the path of the file with the count of the frontend with this identity."""
    return Path(run_directory) / f"{identity}.requests"


def take_left(path: Path) -> int:
    """Return the count of a frontend that has ended, and remove its file; 0 if there is none (it never served HTTP)."""
    try:
        data = path.read_bytes()
        path.unlink()
    except OSError:
        return 0
    return max(memoryview(data).cast("q")[0], 0) if len(data) == _NUM_BYTES else 0
