"""Waits of tests for the work of other processes and threads, with deadlines that a busy machine does not shorten."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
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
    `orphans`: process ids that count too, of descendants whose parents have ended or will.
    """

    def __init__(self, seconds: float, orphans: Iterable[int] = ()) -> None:
        self._seconds, self._orphans = seconds, tuple(orphans)
        self._start = time.monotonic()
        self._before = _cpu_waits_s(self._orphans)

    def left_s(self) -> float:
        """Return the seconds that are left, 0 if the deadline has passed."""
        left = self._start + self._seconds - time.monotonic()
        if left <= 0:  # a walk through all threads, so not before
            waits = _cpu_waits_s(self._orphans).items()
            left += max((wait - self._before.get(thread, 0.0) for thread, wait in waits), default=0.0)
        return max(0.0, left)

    def has_passed(self) -> bool:
        return self.left_s() <= 0


def wait_until(
    find: Callable[[], T],
    reason: str | Callable[[], object] = "",
    timeout_s: float = WAIT_S,
    orphans: Iterable[int] = (),
) -> T:
    """Return the first true value of `find`. AssertionError with the reason, which a function may say only then, and
    the last value at the deadline."""
    if found := find():
        return found
    deadline = Deadline(timeout_s, orphans)  # walks through all threads
    asked = threading.Event()
    while not (found := find()):
        if deadline.has_passed():
            said = reason() if callable(reason) else reason or find
            raise AssertionError(f"not within {timeout_s:g} s: {said} (last value: {found!r})")
        asked.wait(ASK_S)
    return found


def num_switches(pid: int) -> int:
    """Return how often the threads of a process gave up a CPU, or had to."""
    statuses = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    lines = [line for status in statuses for line in status.splitlines()]
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def _cpu_waits_s(orphans: Iterable[int]) -> dict[str, float]:
    """Return how long each thread of this process, of its descendants and of orphans has waited for a CPU, by its
    file."""
    process = psutil.Process()
    waits = {}
    for pid in {process.pid, *(child.pid for child in process.children(recursive=True)), *orphans}:
        with contextlib.suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError, IndexError):
                    waits[str(thread)] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waits
