"""LocalSession: a client that lives in the frontend's own process, as the HTTP server does.

It gets structs, not frames, in the turn in which they are made. Nothing can be lost between the two, so that there is
no lease, and what it is told is never in flight, so that there are no credits.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ipc.messages import Deltas, FrontendMessage
from .client_session import ClientSession

_FOR_EVER = float("inf")


class LocalSession(ClientSession):
    """Never silent and always with a lease: the table neither forgets it nor takes it for dead.

    `num_readers` is its owner's: of those who have not passed on yet all that was delivered to them.
    """

    def __init__(self, identity: bytes, deliver: Callable[[FrontendMessage], None]) -> None:
        """`deliver` is called in the frontend's loop; it must be cheap and must not raise."""
        super().__init__(identity, _FOR_EVER)
        self.deliver = deliver
        self.num_readers = 0

    @property
    def is_owed(self) -> bool:
        return bool(self.num_readers) or super().is_owed

    @property
    def has_lease(self) -> bool:
        return True

    @property
    def lease_end(self) -> float:
        return _FOR_EVER

    def take_frames(self) -> list[bytes]:
        while self.has_news:
            self.deliver(Deltas(deltas=self._take_deltas()))
        return []
