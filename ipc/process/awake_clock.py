"""AwakeClock: seconds in which this process could run.

CLOCK_MONOTONIC goes on while a process is suspended (cgroup freezer, SIGSTOP, a debugger), and so do the limits that
are measured by it: after the suspension every peer seems to have been silent for all of it. By this clock a suspension
takes one beat, however long it was. Knows no process and no limit; whoever has a limit by it looks once a beat.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MISSED_BEATS = 2  # without a look, after which the process is taken to have been suspended


class AwakeClock:
    """`now` never goes back. Between two looks it advances by the time that passed, but for a gap of more than
    MISSED_BEATS by one beat: a process that is only slow, or gets little CPU, still comes to the end of its limits."""

    def __init__(self, beat_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`beat_s`: the longest time between two looks of a process that waits for a limit."""
        self._beat_s, self._monotonic = beat_s, monotonic
        self.now = self._looked_at = monotonic()  # `now` as of the last look
        self.num_gaps = 0

    def look(self) -> float:
        """Advance, and return `now`."""
        looked_at = self._monotonic()
        elapsed, self._looked_at = looked_at - self._looked_at, looked_at
        if elapsed > MISSED_BEATS * self._beat_s:
            self.num_gaps += 1
            elapsed = self._beat_s
        self.now += elapsed
        return self.now

    def patience_s(self, until: float) -> float:
        """How long to wait before the next look, if `until` is the next limit by this clock."""
        return min(max(until - self.now, 0.0), self._beat_s)
