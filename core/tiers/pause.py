"""Pause: a time during which something that has failed is not tried again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONGEST_S = 300.0


class Pause:
    """Pause that starts after `num_failures` consecutive failures and lasts `first_s`. Each further failure after a
    pause starts one of twice the length, up to LONGEST_S. Several threads may use it."""

    def __init__(self, num_failures: int, first_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_failures, self._first_s, self._clock = num_failures, first_s, clock
        self._lock = threading.Lock()
        self._count = 0
        self._length_s = 0.0
        self._until = -float("inf")

    @property
    def has_failures(self) -> bool:
        """Whether anything has failed since the last success."""
        return self._count > 0

    @property
    def is_on(self) -> bool:
        return self._clock() < self._until

    @property
    def has_begun(self) -> bool:
        """Whether a pause has started since the last success."""
        return self._count >= self._num_failures

    def failed(self) -> bool:
        """Count a failure; return whether it starts a pause."""
        with self._lock:
            self._count += 1
            if self._count < self._num_failures or self.is_on:
                return False
            self._length_s = min(max(2 * self._length_s, self._first_s), LONGEST_S)
            self._until = self._clock() + self._length_s
            return True

    def succeeded(self) -> bool:
        """Reset the count after a success; return whether there were failures before it."""
        with self._lock:
            had_failures = self.has_failures
            self._count, self._length_s, self._until = 0, 0.0, -float("inf")
            return had_failures
