"""SessionTable: the clients that the frontend knows, which of them have news, and when the next is overdue.

Decides nothing about requests: it says who is silent for too long, and the frontend ends what they owned.
"""

from __future__ import annotations

from collections.abc import Iterator

from .client_session import ClientSession
from .output_processor import Session

MAX_SESSIONS = 4096  # beyond, half of those without requests are forgotten, the longest silent first
NEVER = float("inf")


class SessionTable:
    """Invariant: a session with news that its credits let through is marked, from `mark` to the next `take_frames`."""

    def __init__(self) -> None:
        self._session_by_identity: dict[bytes, Session] = {}
        self._with_updates: dict[bytes, Session] = {}
        self.next_lease_end = NEVER  # monotonic seconds; may be too early, never too late

    def __iter__(self) -> Iterator[Session]:
        return iter(self._session_by_identity.values())

    def get(self, identity: bytes) -> Session | None:
        return self._session_by_identity.get(identity)

    def add(self, identity: bytes, now: float) -> Session:
        """A new client. Who is forgotten for it gets Unknown for its next message, and begins anew."""
        if len(self._session_by_identity) >= MAX_SESSIONS:
            idle = sorted((each for each in self if not each.has_lease), key=lambda each: each.last_seen)
            for session in idle[: (len(idle) + 1) // 2]:
                self.remove(session)
        session = self._session_by_identity[identity] = ClientSession(identity, now)
        return session

    def add_local(self, session: Session) -> None:
        """A session that was made elsewhere and is never forgotten."""
        self._session_by_identity[session.identity] = session

    def remove(self, session: Session) -> None:
        self._session_by_identity.pop(session.identity, None)
        self._with_updates.pop(session.identity, None)

    def mark(self, session: Session) -> None:
        """The session has news, or credits for those that it had: something may be sent."""
        if session.has_updates:
            self._with_updates[session.identity] = session

    def take_frames(self) -> list[tuple[bytes, bytes]]:
        """Identity and frame of all that may be sent: one message for each client, unless it is very large."""
        marked, self._with_updates = self._with_updates, {}
        return [(identity, frame) for identity, session in marked.items() for frame in session.take_frames()]

    def open_lease(self, session: Session) -> None:
        """The session owns a request from now on: its silence counts."""
        self.next_lease_end = min(self.next_lease_end, session.lease_end)

    def renew_leases(self, now: float) -> None:
        """Nobody could be heard up to now."""
        for session in self:
            session.last_seen = now

    def take_expired(self, now: float) -> list[Session]:
        """Those whose lease is over."""
        if now < self.next_lease_end:
            return []
        owing = [session for session in self if session.has_lease]
        self.next_lease_end = min((each.lease_end for each in owing if each.lease_end > now), default=NEVER)
        return [session for session in owing if session.lease_end <= now]
