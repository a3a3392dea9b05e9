"""Breaker: keeps a place that fails from being asked again and again.

Three failures in a row open it, for 5 s at first. Then one request tests the place: a success closes the breaker, a
failure opens it for twice as long, up to 300 s. From the first failure on, requests that ask `admit` pass one at a
time, so a place that does not answer costs three timeouts however many requests there are. Requests may be of several
kinds: a failure is forgiven by a success of its own kind only, so a place that finds all and loads nothing opens it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_FAILURES = 3
FIRST_PERIOD_S = 5.0
LONGEST_PERIOD_S = 300.0


class Breaker:
    """The breaker of one place. Each attempt that `admit` allows ends with a call of succeeded, failed or cancelled."""

    def __init__(
        self,
        max_failures: int = MAX_FAILURES,
        first_period_s: float = FIRST_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures, self._first_period_s, self._clock = max_failures, first_period_s, clock
        self._lock = threading.Lock()
        self._num_failures = 0  # in a row
        self._failed_kinds: set[str] = set()  # of those
        self._is_trying = False  # the one attempt after a failure has not ended
        self._period_s = 0.0
        self._is_open_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the place must not be asked now."""
        return self.is_broken and self._clock() < self._is_open_until

    @property
    def is_broken(self) -> bool:
        """Whether it has opened and no attempt has succeeded since."""
        return self._num_failures >= self._max_failures

    def admit(self) -> bool:
        """Return whether the place may be asked; if so, begin an attempt."""
        with self._lock:
            if self._num_failures:
                if self._is_trying or self.is_open:
                    return False
                self._is_trying = True
            return True

    def succeeded(self, kind: str = "") -> bool:
        """End an attempt with a success; return whether that repaired a broken place."""
        with self._lock:
            was_broken = self.is_broken
            self._is_trying = False
            self._failed_kinds.discard(kind)
            if not self._failed_kinds:
                self._num_failures = 0
            return was_broken and not self.is_broken

    def failed(self, kind: str = "") -> bool:
        """End an attempt with a failure; return whether that has broken the place."""
        with self._lock:
            if self.is_open:  # this attempt began before
                return False
            self._failed_kinds.add(kind)
            self._num_failures += 1
            self._is_trying = False
            if not self.is_broken:
                return False
            is_first = self._num_failures == self._max_failures
            self._period_s = self._first_period_s if is_first else min(2 * self._period_s, LONGEST_PERIOD_S)
            self._is_open_until = self._clock() + self._period_s
            return is_first

    def cancelled(self) -> None:
        """End an attempt that says nothing about the place."""
        with self._lock:
            self._is_trying = False
