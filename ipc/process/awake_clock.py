"""AwakeClock: a clock that does not count the time in which this process was suspended.

CLOCK_MONOTONIC continues during a suspension (cgroup freezer, SIGSTOP, a debugger), so that afterwards every peer seems
to have been silent for its whole length. This clock counts any suspension as one beat. A user of it must read it at
least once a beat.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LONG_AGO = 1 << 63  # s or ns
_UNIX_AT_0 = time.time() - time.monotonic()
MISSED_BEATS = 2  # a longer time between two reads counts as a suspension


class AwakeClock:
    """A monotonic clock: `look` advances `now` by the elapsed time, or by one beat if that exceeds MISSED_BEATS.

    A process that is only slow, or gets little CPU, still reaches its time limits.
    """

    def __init__(self, beat_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`beat_s`: the longest time between two calls of `look` in a process that is not suspended."""
        self._beat_s, self._monotonic = beat_s, monotonic
        self.now = self._looked_at = monotonic()  # `now` as of the last look
        self.num_gaps = 0

    def look(self) -> float:
        """Advance and return `now`."""
        looked_at = self._monotonic()
        elapsed, self._looked_at = looked_at - self._looked_at, looked_at
        if elapsed > MISSED_BEATS * self._beat_s:
            self.num_gaps += 1
            elapsed = self._beat_s
        self.now += elapsed
        return self.now

    def patience_s(self, until: float) -> float:
        """Return how long to wait before the next `look`, at most a beat, if `until` is the next time limit."""
        return min(max(until - self.now, 0.0), self._beat_s)


def order_of_use(last_use: int, now: int) -> int:
    """Return the place of a file among others, by its time of last use. A time in the future, which a clock gave that
    was set back later, comes before all others: such a file would stay longest."""
    return last_use if last_use <= now else last_use - _LONG_AGO


def steady_time() -> float:
    """Return unix seconds by the clock as it was at this process's start: it does not jump when the clock is set, so
    that time limits may be measured by it."""
    return _UNIX_AT_0 + time.monotonic()
