"""PageFile: a file that is read and written in whole pages, without the page cache if the file system allows
(O_DIRECT).

Reading a file once, such as a new adapter, then takes no fresh pages for the cache. It would need one for each 4 KiB,
and in a virtual machine that returns free memory to its host, each costs 10 to 16 µs of CPU time.
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
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # errors of file systems without O_DIRECT


def new_pages(num_bytes: int) -> memoryview:
    """Return zeroed memory of at least `num_bytes` in whole pages, from WINDOW_BYTES on in huge pages. Reuse it: the
    first use costs more than reading as many bytes from a file."""
    size = -(-num_bytes // PAGE) * PAGE
    surplus = WINDOW_BYTES if size >= WINDOW_BYTES else 0
    pages = mmap.mmap(-1, size + surplus, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if surplus:
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % surplus if surplus else 0
    return memoryview(pages)[start : start + size]


class PageFile:
    """An open file, used as a context manager. Its methods raise the system's OSErrors."""

    def __init__(self, path: Path | str, flags: int = os.O_RDONLY, is_direct: bool = True) -> None:
        """`flags`: those of os.open. `is_direct`: bypass the page cache if the file system allows it."""
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
        """Read into `pages`, made by `new_pages`, from `offset`, a multiple of PAGE. Return the number of bytes read:
        fewer than `pages` holds only at the file's end."""
        num_wanted = min(len(pages), os.fstat(self.fd).st_size - offset)
        num_read = 0
        while num_read < num_wanted and (count := self._move(os.preadv, pages[num_read:], offset + num_read)):
            num_read += count
        return min(num_read, max(num_wanted, 0))

    def write(self, pages: memoryview, offset: int) -> None:
        """Write `pages`, made by `new_pages`, at `offset`, a multiple of PAGE."""
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
