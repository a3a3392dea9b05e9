"""SessionTable: the sessions of all clients, the messages to them, and the time at which the next lease ends.

It reports sessions with expired leases; the frontend then ends their requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....ipc.codec import encode
from ....ipc.messages.client import FrontendMessage
from .client_session import NEVER, ClientSession
from .request_state import Session

MAX_SESSIONS = 4096  # at this number half of the sessions without open work are evicted, the longest silent first


class SessionTable:
    """Sessions by client identity.

    Invariant: a session with updates and credits is marked, from `mark` to the next `take_frames`.
    """

    def __init__(self) -> None:
        self._session_by_identity: dict[bytes, Session] = {}
        self._with_updates: dict[bytes, Session] = {}
        self.outbox: list[tuple[bytes, bytes]] = []  # (identity, frame) of unsent messages
        self.next_lease_end = NEVER  # monotonic seconds; a lower bound

    def __iter__(self) -> Iterator[Session]:
        return iter(self._session_by_identity.values())

    def get(self, identity: bytes) -> Session | None:
        return self._session_by_identity.get(identity)

    def add(self, identity: bytes, now: float) -> Session:
        """Add a client; at MAX_SESSIONS evict half of the idle ones, which get Unknown for their next message."""
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
        """Queue a message to a client in the outbox, or deliver it to an in-process one; no session is needed."""
        session = self.get(identity)
        if session is None:
            self.outbox.append((identity, encode(message)))
        else:
            session.send(message)

    def mark(self, session: Session) -> None:
        """Note that a session has new updates, or new credits for updates."""
        self._with_updates[session.identity] = session

    def take_frames(self) -> list[tuple[bytes, bytes]]:
        """Remove and return frames of updates, as credits allow: one message per client, unless it is very large."""
        marked, self._with_updates = self._with_updates, {}
        return [(identity, frame) for identity, session in marked.items() for frame in session.take_frames()]

    def send_updates(self) -> None:
        """Queue the frames of `take_frames` in the outbox."""
        self.outbox += self.take_frames()

    def open_lease(self, session: Session) -> None:
        """Let `next_lease_end` include the lease of a session that has got open work."""
        self.next_lease_end = min(self.next_lease_end, session.lease_end)

    def renew_leases(self, now: float) -> None:
        """Restart all leases: messages could not be received up to `now`."""
        for session in self:
            session.last_seen = now

    def take_expired(self, now: float) -> list[Session]:
        """Return the sessions with an expired lease (none before `next_lease_end`) and set `next_lease_end` anew."""
        leased = [session for session in self if session.has_lease]
        self.next_lease_end = min((each.lease_end for each in leased if each.lease_end > now), default=NEVER)
        return [session for session in leased if session.lease_end <= now]
