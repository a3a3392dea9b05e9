"""SignsOfLife: asks core and frontend for a sign of life now and then, and finds the child that hangs.

A child that is starting says by itself how far it is. Workers that serve are the core's to watch.
"""

from __future__ import annotations

import math
import time

from ...ipc.messages.base import Ping
from .children import Child, Roster

START_GRACE = 5  # times the hang timeout, or the first start, for a replacement that is still starting
PINGS_PER_TIMEOUT = 3  # core and frontend answer within milliseconds unless they hang


class SignsOfLife:
    """`next_at` is when the next look is due, in monotonic seconds."""

    def __init__(self, roster: Roster, hang_timeout_s: float) -> None:
        self._roster, self._hang_timeout_s = roster, hang_timeout_s
        self._interval_s = hang_timeout_s / PINGS_PER_TIMEOUT
        self._start_limit_s = math.inf
        self.next_at = math.inf

    def begin(self, first_start_s: float) -> None:
        """The engine serves; its start took `first_start_s`."""
        self._start_limit_s = START_GRACE * max(self._hang_timeout_s, first_start_s)
        self.next_at = time.monotonic()

    def look(self) -> tuple[Child, str] | None:
        """Ping core and frontend if it is time. Return the first child that hangs, and how to say so."""
        now = time.monotonic()
        if now < self.next_at:
            return None
        late_s, self.next_at = now - self.next_at, now + self._interval_s
        for child in self._roster.children:
            child.process.oom_kills.look()
            excused_s = late_s + child.process.take_starved_s()  # it was not asked, or cannot run: that is no hang
            child.heard_at = min(child.heard_at + excused_s, now)
            if child.role == "worker" and child.is_ready:
                continue  # the core watches it
            if self._only_waits(child):
                child.heard_at = now
            if now - child.heard_at > (self._hang_timeout_s if child.is_ready else self._start_limit_s):
                hang = f"{child.process.name} hangs: no sign of life for {now - child.heard_at:.1f} s"
                return child, child.describe_end() if child.failure else hang
            if child.role != "worker":
                self._roster.tell(child, Ping())
        return None

    def _only_waits(self, child: Child) -> bool:
        """Whether it can do nothing but wait: a frontend for a core, a rank for the other ranks."""
        if child.role == "frontend" and not child.is_ready and not self._roster.is_up("core"):
            return True
        return child.measured is not None and any(each.measured is None for each in self._roster.of("worker"))
