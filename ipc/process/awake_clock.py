"""AwakeClock: a clock that does not count the time in which this process was suspended.

CLOCK_MONOTONIC continues during a suspension (cgroup freezer, SIGSTOP, a debugger), so that afterwards every peer seems
to have been silent for its whole length. With this clock, a gap of more than MISSED_BEATS beats between two reads
counts as one beat. Its user must read it at least once a beat. Two functions protect uses of the wall clock from its
changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LONG_AGO = 1 << 63  # s or ns
_UNIX_AT_0 = time.time() - time.monotonic()
MISSED_BEATS = 2  # beats; a longer gap between two reads counts as a suspension


class AwakeClock:
    """A monotonic clock: `look` advances `now` by the elapsed time, or by one beat if that is above MISSED_BEATS beats.

    So a process that is only slow, or gets little CPU, still reaches its time limits.
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
        """Return the seconds to wait before the next `look`: until `until`, a time of this clock, but at most a
        beat."""
        return min(max(until - self.now, 0.0), self._beat_s)


def order_of_use(last_use: int, now: int) -> int:
    """Return a sort key for a file's time of last use. A time in the future, left from before the clock was set back,
    sorts before all others: otherwise that file would be kept longest."""
    return last_use if last_use <= now else last_use - _LONG_AGO


def steady_time() -> float:
    """Return unix seconds: the wall clock's time at this process's start plus the monotonic time since then. The value
    does not jump when the clock is set, so time limits can be measured with it."""
    return _UNIX_AT_0 + time.monotonic()
