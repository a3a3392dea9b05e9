"""PageFile: a file that is read and written in whole pages, past the page cache where the file system can (O_DIRECT).

Files that are read once, such as a new adapter, take no fresh pages then: the cache would need one for each 4 KiB, and
in a virtual machine that returns free memory to its host, each costs 10 to 16 µs of CPU time.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from .arena import PAGE

WINDOW_BYTES = 2 << 20  # a huge page: a request of that size costs no more than one of 64 KiB
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # of O_DIRECT


def new_pages(num_bytes: int) -> memoryview:
    """Return zeroed memory of whole pages, from WINDOW_BYTES on of huge ones. To be used again: its first use costs
    more than a read of as many bytes."""
    size = -(-num_bytes // PAGE) * PAGE
    surplus = WINDOW_BYTES if size >= WINDOW_BYTES else 0
    pages = mmap.mmap(-1, size + surplus, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if surplus:
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % surplus if surplus else 0
    return memoryview(pages)[start : start + size]


class PageFile:
    """An open file, used as a context manager. Methods raise OSError as the system gives it."""

    def __init__(self, path: Path | str, flags: int = os.O_RDONLY, is_direct: bool = True) -> None:
        """`flags`: as of os.open. `is_direct`: go past the page cache if the file system can."""
        self._is_direct = is_direct
        try:
            self.fd = os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0), 0o666)
        except OSError as error:
            if not is_direct or error.errno not in _REFUSALS:
                raise
            self._is_direct = False
            self.fd = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    def read(self, pages: memoryview, offset: int) -> int:
        """Fill whole pages of `new_pages` from an offset at a page on; return the bytes, fewer only at the file's
        end."""
        num_wanted = min(len(pages), os.fstat(self.fd).st_size - offset)
        num_read = 0
        while num_read < num_wanted and (count := self._move(os.preadv, pages[num_read:], offset + num_read)):
            num_read += count
        return min(num_read, max(num_wanted, 0))

    def write(self, pages: memoryview, offset: int) -> None:
        """Write whole pages of `new_pages` at an offset at a page."""
        while pages:
            count = self._move(os.pwritev, pages, offset)
            pages, offset = pages[count:], offset + count

    def _move(self, operate: Callable[[int, list[memoryview], int], int], pages: memoryview, offset: int) -> int:
        try:
            return operate(self.fd, [pages], offset)
        except OSError as error:
            if not self._is_direct or error.errno not in _REFUSALS:
                raise
            self._is_direct = False
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            return operate(self.fd, [pages], offset)
