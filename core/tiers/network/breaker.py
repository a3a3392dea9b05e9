"""Breaker: a circuit breaker that stops requests to a place that fails.

Three consecutive failures open it, at first for 5 s. Then one request tests the place: a success closes the breaker, a
failure opens it for twice as long, up to 300 s. From the first failure on, requests that call `admit` are let through
one at a time, so a place that does not answer costs the timeouts of the requests under way and at most two more before
the breaker opens. Requests may be of several kinds: only a success of the same kind clears a failure. So a place where
all lookups succeed and all loads fail opens the breaker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..pause import Pause

MAX_FAILURES = 3
FIRST_PERIOD_S = 5.0


class Breaker:
    """Breaker of one place. Each attempt that `admit` allows must end with a call of succeeded, failed or cancelled."""

    def __init__(
        self,
        max_failures: int = MAX_FAILURES,
        first_period_s: float = FIRST_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pause = Pause(max_failures, first_period_s, clock)
        self._lock = threading.Lock()
        self._failed_kinds: set[str] = set()  # kinds of the consecutive failures
        self._is_trying = False  # the single attempt after a failure has not ended

    @property
    def is_open(self) -> bool:
        """Whether the place must not be used now."""
        return self._pause.is_on

    @property
    def is_broken(self) -> bool:
        """Whether the breaker has opened and no success has closed it since, even if its pause is over."""
        return self._pause.has_begun

    def admit(self) -> bool:
        """Return whether the place may be used; if so, an attempt begins."""
        with self._lock:
            if self._pause.has_failures:
                if self._is_trying or self.is_open:
                    return False
                self._is_trying = True
            return True

    def succeeded(self, kind: str = "") -> bool:
        """End an attempt with a success; return whether that closes a breaker that had opened. It stays open while a
        failure of another kind is not cleared."""
        with self._lock:
            was_broken = self.is_broken
            self._is_trying = False
            self._failed_kinds.discard(kind)
            if not self._failed_kinds:
                self._pause.succeeded()
            return was_broken and not self.is_broken

    def failed(self, kind: str = "") -> bool:
        """End an attempt with a failure; return whether that opens the breaker for the first time since it was
        closed."""
        with self._lock:
            if self.is_open:  # this attempt began before the breaker opened
                return False
            was_broken = self.is_broken
            self._failed_kinds.add(kind)
            self._is_trying = False
            return self._pause.failed() and not was_broken

    def cancelled(self) -> None:
        """End an attempt whose result shows nothing about the place."""
        with self._lock:
            self._is_trying = False
