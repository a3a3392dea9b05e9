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

from ..pause import Pause

MAX_FAILURES = 3
FIRST_PERIOD_S = 5.0


class Breaker:
    """The breaker of one place. Each attempt that `admit` allows ends with a call of succeeded, failed or cancelled."""

    def __init__(
        self,
        max_failures: int = MAX_FAILURES,
        first_period_s: float = FIRST_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pause = Pause(max_failures, first_period_s, clock)
        self._lock = threading.Lock()
        self._failed_kinds: set[str] = set()  # of the failures in a row
        self._is_trying = False  # the one attempt after a failure has not ended

    @property
    def is_open(self) -> bool:
        """Whether the place must not be asked now."""
        return self._pause.is_on

    @property
    def is_broken(self) -> bool:
        """Whether it has opened and no attempt has succeeded since."""
        return self._pause.has_begun

    def admit(self) -> bool:
        """Return whether the place may be asked; if so, begin an attempt."""
        with self._lock:
            if self._pause.has_failures:
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
                self._pause.succeeded()
            return was_broken and not self.is_broken

    def failed(self, kind: str = "") -> bool:
        """End an attempt with a failure; return whether that has broken the place."""
        with self._lock:
            if self.is_open:  # this attempt began before
                return False
            was_broken = self.is_broken
            self._failed_kinds.add(kind)
            self._is_trying = False
            return self._pause.failed() and not was_broken

    def cancelled(self) -> None:
        """End an attempt that says nothing about the place."""
        with self._lock:
            self._is_trying = False
