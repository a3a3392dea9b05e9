"""ObjectFiles: reads and writes the files of objects, into and from slots without a copy.

A file holds the header page, the payload, and zeros up to the end of a page. With O_DIRECT the disk writes into the
slot itself; only the payload's last partial page goes through a buffer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from pathlib import Path

from ...ipc.process.arena import PAGE
from ...ipc.spec.config.private_folder import make_folder
from .object_format import HEADER_BYTES, Defect, find_defect, write_header


class _Buffers(threading.local):
    """Two pages outside the arena, for each thread: the header and the last partial page."""

    def __init__(self) -> None:
        pages = memoryview(mmap.mmap(-1, HEADER_BYTES + PAGE))  # page-aligned
        self.header, self.tail = pages[:HEADER_BYTES], pages[HEADER_BYTES:]


class ObjectFiles:
    """The files of objects. Methods raise the OSErrors of the disk."""

    def __init__(self, is_direct: bool) -> None:
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if is_direct else 0)
        self._buffers = _Buffers()

    @staticmethod
    def size(slot_bytes: int) -> int:
        """Return the size in bytes of the file of an object with a payload of `slot_bytes`."""
        return HEADER_BYTES + -(-slot_bytes // PAGE) * PAGE

    def read(self, path: str, namespace: bytes, key: bytes, slot: memoryview, sets_time: bool = False) -> Defect | None:
        """Read an object into its slot; return its defect, or None. After a defect the slot's content is undefined.
        `sets_time`: also set the file's time to now."""
        parts = self._parts(slot)
        fd = os.open(path, os.O_RDONLY | self._flags)
        try:
            num_read = os.preadv(fd, parts, 0)
            if sets_time:
                with contextlib.suppress(OSError):  # a read-only disk
                    os.utime(fd)
        finally:
            os.close(fd)
        if num_read != sum(map(len, parts)):
            return "length"
        rest, tail = len(slot) % PAGE, self._buffers.tail
        if rest:
            slot[-rest:] = tail[:rest]
        defect = find_defect(self._buffers.header, namespace, key, slot)
        return "checksum" if defect is None and rest and any(tail[rest:]) else defect

    def write(self, path: str, temporary: str, namespace: bytes, key: bytes, slot: memoryview, owner: int) -> None:
        """Write an object to the file `temporary`, and rename that to `path`, whose folder is made if it is missing.
        After an error `temporary` is removed, and `path` is as before."""
        parts = self._parts(slot)
        write_header(self._buffers.header, namespace, key, slot, owner)
        rest, tail = len(slot) % PAGE, self._buffers.tail
        if rest:
            tail[:rest] = slot[-rest:]
            tail[rest:] = bytes(PAGE - rest)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._flags, 0o600)
            try:
                if os.pwritev(fd, parts, 0) != sum(map(len, parts)):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(fd)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                make_folder(Path(path).parent)
                os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _parts(self, slot: memoryview) -> list[memoryview]:
        rest = len(slot) % PAGE
        parts = [self._buffers.header, slot[: len(slot) - rest], *([self._buffers.tail] if rest else [])]
        return [part for part in parts if part]


def can_write_directly(folder: str) -> bool:
    """Return whether the file system accepts O_DIRECT, by writing a page. OSError if no page can be written at all."""
    path = f"{folder}/probe"
    page = memoryview(mmap.mmap(-1, PAGE))
    for flag in (os.O_DIRECT, 0):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | flag, 0o600)
            try:
                os.pwritev(fd, [page], 0)
            finally:
                os.close(fd)
            return bool(flag)
        except OSError as error:
            if not flag or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
    return False
