"""Copies of files that are read once: each piece is checked, hashed and written before the next is read."""

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

PIECE_BYTES = 256 << 10  # stays in a core's cache
WRITE_BYTES = 1 << 20  # at once: each write has a cost of its own
FICLONE = 0x40049409  # linux/fs.h


def copy_file(
    source: Path,
    target: Path,
    check: FiniteCheck | None = None,
    content: Digest | None = None,
    pause: Pause = no_pause,
    pages: memoryview | None = None,
) -> None:
    """Copy a file, which shares its blocks if the file system can; its bytes are added to `content`. RequestError if
    `check` finds a fault, or if the source becomes shorter. `pause` is called between pieces. `pages`: memory to use,
    WINDOW_BYTES of `new_pages`."""
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
        os.fsync(new.fileno())  # a renamed folder is complete, also after a power failure


def _share_blocks(old: FileIO, new: FileIO) -> bool:
    """Let both files have the same blocks; return whether the file system can."""
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
    """Writes bytes behind one another to a file, in whole pages, many at once."""

    def __init__(self, file: PageFile, pages: memoryview) -> None:
        self._file, self._pages = file, pages
        self._num_held = 0  # bytes that wait at the front
        self._offset = 0  # of the front

    def space(self, num_bytes: int) -> memoryview:
        """Return the memory for the next bytes, at most PIECE_BYTES."""
        return self._pages[self._num_held : self._num_held + num_bytes]

    def write(self, num_bytes: int) -> None:
        """Write that many bytes of `space`, now or with later ones."""
        self._num_held += num_bytes
        if self._num_held >= WRITE_BYTES:
            whole = self._num_held // PAGE * PAGE
            self._file.write(self._pages[:whole], self._offset)
            self._pages[: self._num_held - whole] = self._pages[whole : self._num_held]
            self._num_held, self._offset = self._num_held - whole, self._offset + whole

    def finish(self) -> None:
        """Write the bytes that are held; the last page's rest is cut off."""
        if self._num_held:
            self._file.write(self._pages[: -(-self._num_held // PAGE) * PAGE], self._offset)
            os.ftruncate(self._file.fd, self._offset + self._num_held)
