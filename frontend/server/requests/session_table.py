"""SessionTable: the sessions of all clients, the unsent messages to them, and the time at which the next lease ends.

It returns the sessions with expired leases; the frontend then ends their requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....ipc.codec import encode
from ....ipc.messages.client import FrontendMessage
from .client_session import NEVER, ClientSession
from .request_state import Session

MAX_SESSIONS = 4096  # at this number, half of the sessions without open work are evicted, longest silent first


class SessionTable:
    """Owner of the sessions, by client identity.

    Invariant: a session with unsent updates and credits for them is marked (`mark`), until `take_frames` sends them.
    """

    def __init__(self) -> None:
        self._session_by_identity: dict[bytes, Session] = {}
        self._with_updates: dict[bytes, Session] = {}
        self.outbox: list[tuple[bytes, bytes]] = []  # unsent messages: (identity, frame)
        self.next_lease_end = NEVER  # monotonic seconds; no lease ends before

    def __iter__(self) -> Iterator[Session]:
        return iter(self._session_by_identity.values())

    def get(self, identity: bytes) -> Session | None:
        return self._session_by_identity.get(identity)

    def add(self, identity: bytes, now: float) -> Session:
        """Add a client and return its session. At MAX_SESSIONS, first evict half of the idle clients, which get Unknown
        in reply to their next message. `now`: monotonic seconds."""
        if len(self._session_by_identity) >= MAX_SESSIONS:
            idle = sorted((each for each in self if not each.has_lease), key=lambda each: each.last_seen)
            for session in idle[: (len(idle) + 1) // 2]:
                self.remove(session)
        session = self._session_by_identity[identity] = ClientSession(identity, now, self.outbox)
        return session

    def add_local(self, session: Session) -> None:
        """Add an in-process session, which is never evicted."""
        self._session_by_identity[session.identity] = session

    def remove(self, session: Session) -> None:
        self._session_by_identity.pop(session.identity, None)
        self._with_updates.pop(session.identity, None)

    def send(self, identity: bytes, message: FrontendMessage) -> None:
        """Put a message to a client into the outbox, or deliver it if the client is in this process. The client need
        not have a session."""
        session = self.get(identity)
        if session is None:
            self.outbox.append((identity, encode(message)))
        else:
            session.send(message)

    def mark(self, session: Session) -> None:
        """Mark a session that has new updates, or new credits for updates."""
        self._with_updates[session.identity] = session

    def take_frames(self) -> list[tuple[bytes, bytes]]:
        """Remove the updates of marked sessions, as far as credits allow, and return them as (identity, frame): one
        frame per client, or several if they are very large."""
        marked, self._with_updates = self._with_updates, {}
        return [(identity, frame) for identity, session in marked.items() for frame in session.take_frames()]

    def send_updates(self) -> None:
        """Put the frames of `take_frames` into the outbox."""
        self.outbox += self.take_frames()

    def open_lease(self, session: Session) -> None:
        """Update `next_lease_end` for a session that has just got open work, and with it a lease."""
        self.next_lease_end = min(self.next_lease_end, session.lease_end)

    def renew_leases(self, now: float) -> None:
        """Restart all leases at `now`, because no messages could be received before."""
        for session in self:
            session.last_seen = now

    def take_expired(self, now: float) -> list[Session]:
        """Return the sessions whose lease has expired at `now`, in monotonic seconds, and update `next_lease_end`."""
        leased = [session for session in self if session.has_lease]
        self.next_lease_end = min((each.lease_end for each in leased if each.lease_end > now), default=NEVER)
        return [session for session in leased if session.lease_end <= now]
