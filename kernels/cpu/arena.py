"""PackedMemory: a bump allocator of packed weights, in large maps that the system can back with huge pages.

Weights lie in the order of packing, which is the order in which a step reads them. A map, unless it is the newest, is
freed with the last weight in it.
"""

from __future__ import annotations

import ctypes
import mmap

MAP_BYTES = 64 << 20
HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT = 64


class PackedMemory:
    """Allocator for packed weights, from its newest map only; a weight's owner keeps the weight's map alive."""

    def __init__(self, map_bytes: int = MAP_BYTES) -> None:
        self._map_bytes = map_bytes
        self._map: mmap.mmap | None = None
        self._address = 0
        self._used = self._size = 0

    def allocate(self, num_bytes: int) -> tuple[int, mmap.mmap]:
        """Allocate zeroed bytes; return their address, a multiple of ALIGNMENT, and the map that contains them: the
        caller must keep a reference to it."""
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if self._map is None or self._used + num_bytes > self._size:
            self._size = -(-max(num_bytes, self._map_bytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            self._map = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._map.madvise(mmap.MADV_HUGEPAGE)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
            self._used = 0
        start = self._used
        self._used += num_bytes
        return self._address + start, self._map
