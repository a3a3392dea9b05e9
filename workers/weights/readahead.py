"""Read-ahead of a checkpoint's files into the page cache, and the release of their pages.

Files are read by sendfile to the null device, which copies nothing. The system then reads large pieces into large
pages; POSIX_FADV_WILLNEED would stop at a few MiB, in small pages.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ...ipc.spec.config.weight_files import weight_paths

START_BYTES = 1 << 30  # about what a disk reads while torch is imported
AHEAD_BYTES = 256 << 20
PIECE_BYTES = 8 << 20


def start_readahead(folder: Path) -> threading.Thread:
    """Start a thread that reads the first START_BYTES of the weight files in `folder` into the page cache, while torch
    is imported; return it."""
    thread = threading.Thread(target=_read_first, args=(folder,), name="readahead", daemon=True)
    thread.start()
    return thread


def drop_pages(folder: Path) -> None:
    """Drop the weight files in `folder` from the page cache, except pages that a process has mapped."""
    for path in weight_paths(folder):
        with contextlib.suppress(OSError):  # loading the file reports it better
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


class FileReader:
    """Reads a file into the page cache ahead of its owner, in a thread that runs while there is something to read. It
    stops at an error: the owner meets the same one."""

    def __init__(self, path: Path, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._path = path
        self._ahead_bytes = ahead_bytes
        self._lock = threading.Lock()
        self._next = self._end = 0  # the bytes that are to be read into the page cache
        self.is_running = False

    def follow(self, begin: int, end: int) -> None:
        """Note that the owner reads these bytes now. Only while it goes on in order is more read than these."""
        with self._lock:
            if begin <= self._next <= end + self._ahead_bytes:
                self._end = end + self._ahead_bytes
            else:
                self._next = begin
                self._end = end
            is_asleep = not self.is_running
            self.is_running = True
        if is_asleep:
            threading.Thread(target=self._run, name="readahead", daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError), _opened(self._path) as read:
            num_read = begin = 0
            while (piece := self._go_on(begin, num_read)) is not None:
                begin, end = piece
                num_read = read(begin, end) or end - begin  # nothing is read at the end of the file

    def _go_on(self, begin: int, num_read: int) -> tuple[int, int] | None:
        """Note what was read; return what is to be read next, None if that is nothing: the thread ends then."""
        with self._lock:
            if self._next == begin:  # else the owner has gone elsewhere
                self._next += num_read
            self.is_running = self._next < self._end
            if not self.is_running:
                return None
            return self._next, self._end


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Callable[[int, int], int]]:
    """Open a file; yield a function that reads a piece of the bytes from a begin to an end, and returns its size, 0 at
    the end of the file."""
    with path.open("rb", buffering=0) as file, Path(os.devnull).open("wb", buffering=0) as null:
        yield lambda begin, end: os.sendfile(null.fileno(), file.fileno(), begin, min(end - begin, PIECE_BYTES))


def _read_first(folder: Path) -> None:
    left = START_BYTES
    for path in weight_paths(folder):
        with contextlib.suppress(OSError), _opened(path) as read:  # loading the file reports it better
            begin = 0
            while left and (num_read := read(begin, begin + left)):
                begin += num_read
                left -= num_read
