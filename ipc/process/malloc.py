"""What malloc does with large blocks in this process."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 128 << 10


def trim_heap() -> None:
    """Give free pages of malloc's heaps back to the system, after much was freed. Only glibc can."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def return_large_blocks() -> None:
    """Blocks above LARGE_BYTES go back to the system when they are freed. glibc raises the limit, by itself, to the
    largest block that it has seen freed; then tables which Python rebuilds now and then come from the heap, and what is
    small settles in the place of each former one. 500 streams made core and frontend grow by 1.8 and 1.3 MB in 5
    minutes, and make them grow by nothing now. For processes that take few large blocks; only glibc knows of this.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
