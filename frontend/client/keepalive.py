"""Keepalive: decides when to ping a frontend and when its silence means that it is lost. The caller passes the time.

While requests are open, a ping is due every PING_INTERVAL_S. Silence is counted from the first ping that no message has
followed, so that a program that was suspended does not report its frontend as lost when it continues.
"""

from __future__ import annotations

from typing import Literal

from ...ipc.messages.base import PING_INTERVAL_S

SILENCE_S = 10.0


class Keepalive:
    """Timer of pings and silence. Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.next_due: float | None = None  # None: stopped
        self._silent_since: float | None = None

    def reset_silence(self) -> None:
        """Reset the silence timer; the owner calls this for each message from the frontend."""
        self._silent_since = None

    def stop(self) -> None:
        """Stop pings and the silence timer until the next `poll`."""
        self.next_due = self._silent_since = None

    def poll(self, now: float) -> Literal["nothing", "ping", "lost"]:
        """Return the action due at `now`; the caller must send the ping."""
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
