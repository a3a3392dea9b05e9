"""PackedMemory: where packed weights lie, in large pieces that the kernel backs with huge pages.

A model's weights follow each other in the order in which they are packed, which is the order in which a step reads
them. A piece is returned to the system when the last weight in it is gone.
"""

from __future__ import annotations

import ctypes
import mmap

PIECE_BYTES = 64 << 20
HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT = 64


class PackedMemory:
    """Hands out memory from the end of the newest piece; never takes any back itself."""

    def __init__(self) -> None:
        self._piece: mmap.mmap | None = None
        self._address = 0
        self._used = self._size = 0

    def allocate(self, num_bytes: int) -> tuple[int, mmap.mmap]:
        """Address of `num_bytes` zeroed bytes, and what must be kept alive as long as they are used."""
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if self._piece is None or self._used + num_bytes > self._size:
            self._size = -(-max(num_bytes, PIECE_BYTES) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            self._piece = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._piece.madvise(mmap.MADV_HUGEPAGE)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._piece))
            self._used = 0
        start = self._used
        self._used += num_bytes
        return self._address + start, self._piece
