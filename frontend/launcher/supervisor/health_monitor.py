"""HealthMonitor: pings core and frontend, and detects a child that hangs.

A starting child sends its progress without a ping. The core watches the workers once they serve.
"""

from __future__ import annotations

import math
import time

from ....ipc.messages.base import Ping
from .children import Child, Children

START_GRACE = 5  # limit of a starting replacement, in hang timeouts or first starts
PINGS_PER_TIMEOUT = 3  # core and frontend answer within milliseconds unless they hang


class HealthMonitor:
    """Timer of pings and of each child's silence. `next_at`: time of the next check, monotonic seconds."""

    def __init__(self, children: Children, hang_timeout_s: float) -> None:
        self._children, self._hang_timeout_s = children, hang_timeout_s
        self._interval_s = hang_timeout_s / PINGS_PER_TIMEOUT
        self._start_limit_s = math.inf
        self.next_at = math.inf

    def begin(self, first_start_s: float) -> None:
        """Begin the checks when the engine serves; its start took `first_start_s`."""
        self._start_limit_s = START_GRACE * max(self._hang_timeout_s, first_start_s)
        self.next_at = time.monotonic()
        for child in self._children.all:
            child.last_sign_at = self.next_at  # nobody pinged those that were ready before the others

    def check(self) -> tuple[Child, str] | None:
        """Ping core and frontend if `next_at` has come. Return the first child that hangs, with a description, or None;
        the core watches ready workers."""
        now = time.monotonic()
        if now < self.next_at:
            return None
        late_s, self.next_at = now - self.next_at, now + self._interval_s
        for child in self._children.all:
            excused_s = late_s + child.process.take_starved_s()  # a late ping or a busy CPU is no hang
            child.last_sign_at = min(child.last_sign_at + excused_s, now)
            if child.spec.unit.role == "worker" and child.is_ready:
                continue
            if self._is_blocked(child):
                child.last_sign_at = now
            if now - child.last_sign_at > (self._hang_timeout_s if child.is_ready else self._start_limit_s):
                hang = f"{child.spec.name} hangs: no sign of life for {now - child.last_sign_at:.1f} s"
                return child, child.describe_end() if child.failure else hang
            if child.spec.unit.role != "worker":
                self._children.send(child, Ping())
        return None

    def _is_blocked(self, child: Child) -> bool:
        """Whether a starting child waits for another: a frontend for a core, a rank for the other ranks."""
        if child.spec.unit.role == "frontend" and not child.is_ready:
            return not any(each.is_ready for each in self._children.all if each.spec.unit.role == "core")
        return child.measured is not None and any(each.measured is None for each in self._children.of(child.spec.unit))
