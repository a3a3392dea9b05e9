"""PageSupply: takes memory for pages from the kernel before they are first written, while the process is idle.

At the first write of a page the kernel finds memory and clears it, at 0.4 to 2 GB/s on virtual machines: a prompt whose
blocks come from a tier would wait for that longer than for the copies. The supply touches pages in pieces that take
about a millisecond and leaves their content as it is. Pages taken count as used memory, so each `PageRange` has its own
limit, and nothing is taken on a machine that has little left.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import time
from collections.abc import Callable, Sequence

from .machine_memory import available_bytes

PAGE = 4096
LEAST_PIECE, FIRST_PIECE, LARGEST_PIECE = 64 << 10, 256 << 10, 2 << 20
PIECE_S = 0.001  # target duration of a piece; the first in a huge page takes the whole page at once
RESERVE_BYTES = 1 << 30  # left free of the machine's memory and of a cgroup's limit
CHECK_BYTES = 32 << 20  # taken between two reads of the free memory
MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python's mmap has no name for it

_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL during a call, which mmap.madvise does not


class PageRange:
    """Page-aligned memory. The pages of its first `wanted` bytes are taken in order. The memory is not freed while this
    object exists."""

    def __init__(self, memory: mmap.mmap | memoryview, wanted: int, *, is_shared: bool = False) -> None:
        """`memory`: contiguous. `is_shared`: other processes or threads may write to it."""
        self._memory = memoryview(memory).cast("B")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        assert self._address % PAGE == 0
        self._is_shared, self.advice = is_shared, MADV_POPULATE_WRITE
        self._num_taken = self._wanted = 0
        self._is_closed = False
        self.want(wanted)

    def want(self, num_bytes: int) -> None:
        """Raise the number of wanted bytes to `num_bytes`, in whole pages; it never falls."""
        num_bytes = min(num_bytes, self._memory.nbytes)
        self._wanted = max(self._wanted, -(-num_bytes // PAGE) * PAGE)

    @property
    def num_missing(self) -> int:
        """Bytes still to be taken, in whole pages; 0 once the kernel has refused."""
        return 0 if self._is_closed else self._wanted - self._num_taken

    def take(self, num_bytes: int) -> None:
        """Take the next `num_bytes`, whole pages, or the rest. If the kernel refuses, take no more of this range."""
        begin, length = self._num_taken, min(num_bytes, self.num_missing)
        address = ctypes.c_void_p(self._address + begin)
        if not _libc.madvise(address, ctypes.c_size_t(length), self.advice):
            self._num_taken += length
        elif ctypes.get_errno() == errno.EINVAL and not self._is_shared:  # an older kernel
            for offset in range(begin, min(begin + length, self._memory.nbytes), PAGE):
                self._memory[offset] = self._memory[offset]  # not for shared memory: it could undo another's write
            self._num_taken += length
        else:
            self._is_closed = True


class PageSupply:
    """Supply of the pages of some ranges: takes them piece by piece, in the order of the ranges."""

    def __init__(self, ranges: Sequence[PageRange], free_bytes: Callable[[], int] = available_bytes) -> None:
        self._ranges, self._free_bytes, self.monotonic = ranges, free_bytes, time.monotonic
        self._piece = FIRST_PIECE
        self._num_unchecked = CHECK_BYTES  # bytes taken since the last read of the free memory
        self._is_short = False

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to take: every wanted page is taken, or little memory is free."""
        return self._is_short or not any(each.num_missing for each in self._ranges)

    def take_piece(self) -> None:
        """Take a piece of the first range with missing pages, unless little memory is free. Not to be called if
        `is_done`."""
        if self._num_unchecked >= CHECK_BYTES:
            self._num_unchecked, self._is_short = 0, self._free_bytes() < RESERVE_BYTES
            if self._is_short:
                return
        pages = next(each for each in self._ranges if each.num_missing)
        begun = self.monotonic()
        pages.take(self._piece)
        duration_s = self.monotonic() - begun
        self._num_unchecked += self._piece
        if duration_s > PIECE_S:
            self._piece = max(self._piece // 2, LEAST_PIECE)
        elif duration_s < PIECE_S / 2:
            self._piece = min(self._piece * 2, LARGEST_PIECE)
