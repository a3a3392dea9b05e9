"""Keepalive: when to ping a frontend, and when its silence means that it is lost. Has no clock of its own.

A ping goes out every PING_INTERVAL_S while something is open; silence counts from the first ping that nothing
followed, so that a program that was stopped for a while does not blame the frontend.
"""

from __future__ import annotations

from typing import Literal

from ...ipc.messages.base import PING_INTERVAL_S

SILENCE_S = 10.0


class Keepalive:
    """Times are seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self.next_due: float | None = None  # None: at rest
        self._silent_since: float | None = None

    def heard(self) -> None:
        """Something came from the frontend."""
        self._silent_since = None

    def rest(self) -> None:
        """Nothing is open: no pings, no alarm."""
        self.next_due = self._silent_since = None

    def due(self, now: float) -> Literal["nothing", "ping", "lost"]:
        """What to do at `now`; "ping" counts as done."""
        if self._silent_since is not None and now - self._silent_since >= SILENCE_S:
            return "lost"
        if self.next_due is None:
            self.next_due = now + PING_INTERVAL_S
        if now < self.next_due:
            return "nothing"
        self.next_due = now + PING_INTERVAL_S
        if self._silent_since is None:
            self._silent_since = now
        return "ping"
