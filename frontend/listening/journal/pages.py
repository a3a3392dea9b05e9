"""Pages: the memory of a frontend's slots, which outlives the frontend.

The supervisor makes it, one for each frontend, and the frontend and its successors map it. It is a memfd: no file, no
quota, gone with the last process. Its address space is large and holds a place for the largest request in each slot;
memory is taken only where something was written, at most `max_bytes`, and given back by punching holes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import zlib
from typing import NamedTuple

PAGE = 4096
RING_BYTES = 256 << 10
READ_BYTES = 64 << 10  # most bytes that are read from a connection at a time
TOKENS_END = 16 << 20  # four million tokens, or some ten thousand with their logprobs
BODY_PLACE = TOKENS_END + RING_BYTES
_MARGIN_BYTES = 1 << 20  # beside the largest body: its head, and chunks
_PUNCH_HOLE = 2 | 1  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_DONT_DUMP = 16  # MADV_DONTDUMP: texts of users do not belong into core dumps
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class JournalLimits(NamedTuple):
    """Sizes that must be the same in a frontend and its successors."""

    num_slots: int
    max_body_bytes: int  # of a request
    max_bytes: int  # memory for all slots

    @property
    def body_bytes(self) -> int:
        size = self.max_body_bytes + _MARGIN_BYTES
        return size + -size % PAGE

    @property
    def slot_bytes(self) -> int:
        return BODY_PLACE + self.body_bytes

    @property
    def layout(self) -> int:
        return zlib.crc32(f"3 {self.num_slots} {self.body_bytes}".encode())


def new_pages() -> int:
    """Make an empty memory and return its descriptor."""
    return os.memfd_create("tokenloom-http", os.MFD_CLOEXEC)


class Pages:
    """The memory, mapped. The first page is a header; its first number is the layout."""

    def __init__(self, fd: int, limits: JournalLimits) -> None:
        """If an earlier frontend used other limits, begin with empty pages."""
        self.fd, self.limits = fd, limits
        self.body_bytes, self.slot_bytes = limits.body_bytes, limits.slot_bytes
        num_bytes = PAGE + limits.num_slots * limits.slot_bytes
        layout = limits.layout.to_bytes(4, "little")
        if os.pread(fd, 4, 0) not in (b"", layout):
            os.ftruncate(fd, 0)
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, layout, 0)
        self.map = mmap.mmap(fd, num_bytes)
        with contextlib.suppress(OSError):
            self.map.madvise(_DONT_DUMP)
        self.memory = memoryview(self.map)
        self._num_free_bytes = limits.max_bytes
        self.unkept = memoryview(bytearray(READ_BYTES))  # room for bytes that are read and not kept

    def place_of(self, number: int) -> int:
        """Return the offset of the slot with this number."""
        return PAGE + number * self.slot_bytes

    def take(self, num_bytes: int) -> bool:
        """Take memory for a slot; return False if there is not so much left."""
        if num_bytes > self._num_free_bytes:
            return False
        self._num_free_bytes -= num_bytes
        return True

    def take_over(self, num_bytes: int) -> None:
        """Take memory that an earlier frontend has taken, even if it is more than there may be."""
        self._num_free_bytes -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._num_free_bytes += num_bytes

    def punch(self, place: int, num_bytes: int) -> None:
        """Free the pages at this place."""
        _libc.fallocate(self.fd, _PUNCH_HOLE, place, num_bytes)

    def write(self, place: int, data: bytes) -> None:
        """Write without mapping the pages."""
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self.fd, rest, place)
            place += count
            rest = rest[count:]

    @property
    def num_used_bytes(self) -> int:
        """Bytes of memory that slots have taken, beside one page for each."""
        return self.limits.max_bytes - self._num_free_bytes

    def close(self) -> None:
        """Unmap the memory; its slots must not be used again."""
        self.memory.release()
        self.map.close()
