"""Pacer: makes background threads rest between pieces of their work, so that they hardly slow the process's own work.

A lower priority would not do: such a thread may wait for a CPU core while it holds the GIL. So the threads keep their
priority, work for a millisecond at a time, and rest in proportion to the CPU time that they used. They rest for less
time if more loads wait, and not at all while the process is idle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeAlias

SHARE = 0.08  # share of a CPU core for one load: a step of 75 ms on two cores then takes at most 6 ms more
MAX_SHARE = 0.5  # for any number of loads
SLICE_S = 0.001  # CPU time between two rests; more only if one piece of work takes longer
MAX_REST_S = 0.2  # longest rest after one piece: some pieces are long but occur only once, such as an import
LOOK_S = 0.02  # a rest ends at most this long after the process has become idle

Pause: TypeAlias = Callable[[], None]  # function that a background thread calls between pieces of its work


def no_pause() -> None:
    """Return at once, without a rest."""


class Pacer:
    """Schedule of the rests of background threads. They rest one after another, so that the limit of the CPU share
    holds for all threads together."""

    def __init__(
        self,
        is_busy: Callable[[], bool],
        num_waiting: Callable[[], int] = lambda: 1,
        monotonic: Callable[[], float] = time.monotonic,
        thread_time: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`is_busy`: whether the process has work of its own. `num_waiting`: the number of loads that wait or run; the
        threads together get SHARE for each, up to MAX_SHARE. Both are called in the threads. `thread_time`: the CPU
        seconds of the calling thread."""
        self._is_busy, self._num_waiting = is_busy, num_waiting
        self._monotonic, self._thread_time, self._sleep = monotonic, thread_time, sleep
        self.slice_s = SLICE_S
        self._lock = threading.Lock()
        self._free_at = 0.0  # end of the last scheduled rest, in monotonic seconds

    def start(self) -> Pause:
        """Return the function that the calling thread is to call between pieces of the work that it begins now."""
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
        """Rest for `duration_s` after the end of all scheduled rests, or until the process is no longer busy."""
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
