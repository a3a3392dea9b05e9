"""HealthMonitor: pings all child processes except the workers, and detects children that hang.

A starting child reports its progress without being pinged. A frontend is watched like a ready one as soon as its loop
runs: it then goes on with connections, and one of their requests may make it hang. Ready workers are watched by the
core.
"""

from __future__ import annotations

import math
import time

from ....ipc.messages.base import Ping
from .children import Child, Children

START_GRACE = 5  # limit of a replacement's start, in multiples of the longer of hang timeout and first start
PINGS_PER_TIMEOUT = 3  # a child that does not hang answers within milliseconds


class HealthMonitor:
    """Timer of pings and of each child's silence. `next_at`: time of the next check in monotonic seconds."""

    def __init__(self, children: Children, hang_timeout_s: float) -> None:
        self._children, self._hang_timeout_s = children, hang_timeout_s
        self._interval_s = hang_timeout_s / PINGS_PER_TIMEOUT
        self._start_limit_s = math.inf
        self.next_at = math.inf

    def begin(self, first_start_s: float) -> None:
        """Start the checks; called when the engine serves. `first_start_s`: the duration of the engine's start."""
        self._start_limit_s = START_GRACE * max(self._hang_timeout_s, first_start_s)
        self.next_at = time.monotonic()
        for child in self._children.all:
            child.last_sign_at = self.next_at  # children that were ready early were not pinged until now

    def check(self) -> tuple[Child, str] | None:
        """If `next_at` has come, ping all children but the workers, and return the first child that hangs, with a
        description. Return None if none hangs. Ready workers are watched by the core."""
        now = time.monotonic()
        if now < self.next_at:
            return None
        late_s, self.next_at = now - self.next_at, now + self._interval_s
        for child in self._children.all:
            excused_s = late_s + child.process.take_starved_s()  # a late ping or a busy CPU does not count as silence
            child.last_sign_at = min(child.last_sign_at + excused_s, now)
            if child.spec.unit.role == "worker" and child.is_ready:
                continue
            if self._is_blocked(child):
                child.last_sign_at = now
            if now - child.last_sign_at > (self._hang_timeout_s if _is_watched(child) else self._start_limit_s):
                hang = f"{child.spec.name} hangs: no sign of life for {now - child.last_sign_at:.1f} s"
                return child, child.describe_end() if child.failure else hang
            if child.spec.unit.role != "worker":
                self._children.send(child, Ping())
        return None

    def _is_blocked(self, child: Child) -> bool:
        """Return whether a starting child waits for another: a frontend for a core, or a rank for the other ranks."""
        if child.spec.unit.role == "frontend" and not _is_watched(child):
            return not any(each.is_ready for each in self._children.all if each.spec.unit.role == "core")
        return child.measured is not None and any(each.measured is None for each in self._children.of(child.spec.unit))


def _is_watched(child: Child) -> bool:
    """Return whether a child must answer pings within the hang timeout."""
    return child.is_ready or child.answers_pings
