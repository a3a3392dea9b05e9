"""Waits of tests for the work of other processes and threads, with deadlines that a busy machine does not shorten."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

WAIT_S = 20.0
ASK_S = 0.01


class Deadline:
    """A limit of seconds in which no thread of this process or of its descendants waited for a CPU.

    The thread that waited most counts, so that a machine of which each gets half gives twice the time. A hang waits for
    no CPU and meets the limit by the clock. Linux counts the waits (schedstat); elsewhere the clock alone counts.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start = time.monotonic()
        self._before = _cpu_waits_s()

    def left_s(self) -> float:
        """Return the seconds that are left, 0 if the deadline has passed."""
        left = self._start + self._seconds - time.monotonic()
        if left <= 0:  # a walk through all threads, so not before
            left += max((wait - self._before.get(thread, 0.0) for thread, wait in _cpu_waits_s().items()), default=0.0)
        return max(0.0, left)

    def has_passed(self) -> bool:
        return self.left_s() <= 0


def wait_until(find: Callable[[], T], reason: str = "", timeout_s: float = WAIT_S) -> T:
    """Return the first true value of `find`. AssertionError with the reason and the last value at the deadline."""
    deadline = Deadline(timeout_s)
    asked = threading.Event()
    while not (found := find()):
        assert not deadline.has_passed(), f"not within {timeout_s:g} s: {reason or find} (last value: {found!r})"
        asked.wait(ASK_S)
    return found


def _cpu_waits_s() -> dict[str, float]:
    """Return how long each thread of this process and of its descendants has waited for a CPU, by its file."""
    process = psutil.Process()
    waits = {}
    for pid in (process.pid, *(child.pid for child in process.children(recursive=True))):
        with contextlib.suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError, IndexError):
                    waits[str(thread)] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waits
