"""Measures whether work grows faster than its input, in CPU time of this thread: a neighbour on the machine adds none.

Small inputs come first, so that a growth without end is seen before it hangs the test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Work: TypeAlias = Callable[[int], Callable[[], object]]  # makes the work on an input of a size, which is then measured

SIZES = (12, 22, 32, 256, 4096)
QUICK_S = 0.002  # work that takes less is linear: the square of 4096 is 8 million steps of a nanosecond at least
STEP = 4  # between the sizes that are compared
LINEAR = 9.0  # the largest ratio of their times: the square's is 16, that of n·log n 5


def fast_growth(work: Work, sizes: tuple[int, ...] = SIZES, quick_s: float = QUICK_S) -> str:
    """Return the times of two sizes if the work grows with the square of its input or faster, else an empty text."""
    for size in sizes:
        if seconds(work, size) < quick_s or seconds(work, size) < quick_s:
            continue
        long_s = min(seconds(work, size) for _ in range(3))
        short_s = min(seconds(work, max(1, size // STEP)) for _ in range(5))
        if long_s > LINEAR * short_s:
            return f"{size // STEP} take {short_s * 1e3:.2f} ms, {size} take {long_s * 1e3:.2f} ms"
    return ""


def seconds(work: Work, size: int) -> float:
    """Return the CPU time of one run."""
    run = work(size)
    begin = time.thread_time()
    run()
    return time.thread_time() - begin
