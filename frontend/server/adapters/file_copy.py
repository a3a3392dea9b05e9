"""copy_file: copies a file in one pass, in which each piece is checked, hashed and buffered before the next is read."""

from __future__ import annotations

import fcntl
import os
from io import FileIO
from pathlib import Path

from ....ipc.errors import RequestError
from ....ipc.process.arena import PAGE
from ....ipc.process.pacer import Pause, no_pause
from ....ipc.process.page_file import WINDOW_BYTES, PageFile, new_pages
from ....ipc.spec.adapters.digest import Digest
from .finite_check import FiniteCheck

PIECE_BYTES = 256 << 10  # so that a piece stays in the CPU's cache
WRITE_BYTES = 1 << 20  # least size of a write, since each call has a fixed cost
FICLONE = 0x40049409  # ioctl of linux/fs.h


def copy_file(
    source: Path,
    target: Path,
    check: FiniteCheck | None = None,
    content: Digest | None = None,
    pause: Pause = no_pause,
    pages: memoryview | None = None,
) -> None:
    """Copy a file; if the file system can, the copy shares the disk blocks of `source`. The bytes are added to the hash
    `content`. `pause` is called between pieces. `pages`: WINDOW_BYTES of memory from `new_pages` to use, None: new
    memory. RequestError if `check` finds a NaN or an infinity, or if the source becomes shorter; OSError if a file
    cannot be read or written."""
    check = check or FiniteCheck((), str(source))
    with FileIO(source) as old, FileIO(target, "w+") as new, PageFile(target, os.O_WRONLY) as file:
        is_shared = _share_blocks(old, new)
        writer = _PageWriter(file, pages or new_pages(WINDOW_BYTES))
        for start, stop in check.pieces(os.fstat((new if is_shared else old).fileno()).st_size, PIECE_BYTES):
            part = writer.space(stop - start)
            _read(new if is_shared else old, part, source)
            check.check(start, part)
            if content is not None:
                content.update(part)
            if not is_shared:
                writer.write(len(part))
            pause()
        writer.finish()
        os.fsync(new.fileno())  # so that a renamed folder is complete even after a power failure


def _share_blocks(old: FileIO, new: FileIO) -> bool:
    """Make `new` share the disk blocks of `old`; return whether the file system can do it."""
    try:
        fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
    except OSError:
        return False
    return True


def _read(file: FileIO, part: memoryview, source: Path) -> None:
    num_read = 0
    while num_read < len(part):
        count = file.readinto(part[num_read:])
        if not count:
            raise RequestError(f"{source} became shorter while it was copied: load the adapter again")
        num_read += count


class _PageWriter:
    """Writer of consecutive bytes to a file, in whole pages and large writes."""

    def __init__(self, file: PageFile, pages: memoryview) -> None:
        self._file, self._pages = file, pages
        self._num_held = 0  # bytes at the front of `_pages` that are not written yet
        self._offset = 0  # offset in the file of the first of them

    def space(self, num_bytes: int) -> memoryview:
        """Return memory for the caller to put the next `num_bytes` into, at most PIECE_BYTES."""
        return self._pages[self._num_held : self._num_held + num_bytes]

    def write(self, num_bytes: int) -> None:
        """Add the first `num_bytes` of `space` to the file, now or together with later bytes."""
        self._num_held += num_bytes
        if self._num_held >= WRITE_BYTES:
            whole = self._num_held // PAGE * PAGE
            self._file.write(self._pages[:whole], self._offset)
            self._pages[: self._num_held - whole] = self._pages[whole : self._num_held]
            self._num_held, self._offset = self._num_held - whole, self._offset + whole

    def finish(self) -> None:
        """Write the bytes that are still held, and cut off the rest of the last page."""
        if self._num_held:
            self._file.write(self._pages[: -(-self._num_held // PAGE) * PAGE], self._offset)
            os.ftruncate(self._file.fd, self._offset + self._num_held)
