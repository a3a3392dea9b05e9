"""SessionTable: the sessions of all clients, those with unsent updates, and the time at which the next lease ends.

It reports sessions with expired leases; the frontend then ends their requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from .client_session import NEVER, ClientSession
from .output_processor import Session

MAX_SESSIONS = 4096  # at this number half of the sessions without open work are evicted, the longest silent first


class SessionTable:
    """Sessions by client identity.

    Invariant: a session with updates and credits is marked, from `mark` to the next `take_frames`.
    """

    def __init__(self) -> None:
        self._session_by_identity: dict[bytes, Session] = {}
        self._with_updates: dict[bytes, Session] = {}
        self.next_lease_end = NEVER  # monotonic seconds; a lower bound

    def __iter__(self) -> Iterator[Session]:
        return iter(self._session_by_identity.values())

    def get(self, identity: bytes) -> Session | None:
        return self._session_by_identity.get(identity)

    def add(self, identity: bytes, now: float) -> Session:
        """Add a client. Evicts sessions at the limit; an evicted client gets Unknown and must send Hello again."""
        if len(self._session_by_identity) >= MAX_SESSIONS:
            idle = sorted((each for each in self if not each.has_lease), key=lambda each: each.last_seen)
            for session in idle[: (len(idle) + 1) // 2]:
                self.remove(session)
        session = self._session_by_identity[identity] = ClientSession(identity, now)
        return session

    def add_local(self, session: Session) -> None:
        """Add an in-process session, which is never evicted."""
        self._session_by_identity[session.identity] = session

    def remove(self, session: Session) -> None:
        self._session_by_identity.pop(session.identity, None)
        self._with_updates.pop(session.identity, None)

    def mark(self, session: Session) -> None:
        """Note that a session has new updates, or new credits for updates."""
        self._with_updates[session.identity] = session

    def take_frames(self) -> list[tuple[bytes, bytes]]:
        """Return (identity, frame) of updates, as credits allow: one message per client, unless it is very large."""
        marked, self._with_updates = self._with_updates, {}
        return [(identity, frame) for identity, session in marked.items() for frame in session.take_frames()]

    def open_lease(self, session: Session) -> None:
        """Start the lease of a session that has got open work."""
        self.next_lease_end = min(self.next_lease_end, session.lease_end)

    def renew_leases(self, now: float) -> None:
        """Restart all leases: messages could not be received up to `now`."""
        for session in self:
            session.last_seen = now

    def take_expired(self, now: float) -> list[Session]:
        """Return the sessions with an expired lease; there are none before `next_lease_end`."""
        leased = [session for session in self if session.has_lease]
        self.next_lease_end = min((each.lease_end for each in leased if each.lease_end > now), default=NEVER)
        return [session for session in leased if session.lease_end <= now]
