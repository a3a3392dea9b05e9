"""Pacer: rests between the pieces of work of background threads, so that they hardly slow the process's own work.

A priority does not do that: a thread of low priority may wait for a core while it holds the GIL. So the threads keep
theirs, work for a millisecond at a time, and rest in proportion to the CPU time that they took: the less, the more
pieces of work wait. While the process is not busy they do not rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeAlias

SHARE = 0.08  # of one core for a single load: a step of 75 ms on two cores then takes at most 6 ms more
MAX_SHARE = 0.5  # while much work waits
SLICE_S = 0.001  # of CPU time between two rests, and more only if a piece takes more
MAX_REST_S = 0.2  # after one piece: some are paid for once, such as an import
LOOK_S = 0.02  # longest time from the end of the process's work to the end of a rest

Pause: TypeAlias = Callable[[], None]  # a thread's, to be called between pieces of its work


def no_pause() -> None:
    """Go on with the work at once."""


class Pacer:
    """Owns the time at which the next of its threads may go on."""

    def __init__(
        self,
        is_busy: Callable[[], bool],
        num_waiting: Callable[[], int] = lambda: 1,
        monotonic: Callable[[], float] = time.monotonic,
        thread_time: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`is_busy` and `num_waiting` are called by the threads. num_waiting: loads that wait or run; each adds SHARE
        to that of all threads together, up to MAX_SHARE. `thread_time`: CPU seconds of the thread that calls it."""
        self._is_busy, self._num_waiting = is_busy, num_waiting
        self._monotonic, self._thread_time, self._sleep = monotonic, thread_time, sleep
        self.slice_s = SLICE_S
        self._lock = threading.Lock()
        self._free_at = 0.0  # monotonic seconds: the end of the rests so far

    def start(self) -> Pause:
        """Return the function that a thread calls between pieces of the work that it begins now."""
        begun = self._thread_time()

        def pause() -> None:
            nonlocal begun
            used_s = self._thread_time() - begun
            if used_s >= self.slice_s:
                share = min(SHARE * max(self._num_waiting(), 1), MAX_SHARE)
                self._rest(min(used_s * (1 / share - 1), MAX_REST_S))
                begun = self._thread_time()

        return pause

    def _rest(self, duration_s: float) -> None:
        """Rest after all other threads' rests, until the process is no longer busy."""
        if not self._is_busy():
            return
        with self._lock:
            until = self._free_at = max(self._free_at, self._monotonic()) + duration_s
        while (left_s := until - self._monotonic()) > 0:
            self._sleep(min(left_s, LOOK_S))
            if not self._is_busy():
                with self._lock:
                    self._free_at = 0.0
                return
