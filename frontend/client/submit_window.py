"""SubmitWindow: which requests wait to be (re)submitted and how much of what was sent is still unanswered.

What a slow frontend has not answered is bounded in requests and bytes; the rest waits here as the caller's own
objects, so that it costs no copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .open_request import OpenRequest

MAX_UNANSWERED_REQUESTS = 2048
MAX_UNANSWERED_BYTES = 16 << 20


class SubmitWindow:
    """Invariant: a request waits, or was sent and is unanswered, or is not in here."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[OpenRequest, None] = OrderedDict()  # a queue that can be left from its middle
        self._bytes_by_unanswered: dict[OpenRequest, int] = {}
        self._unanswered_bytes = 0

    def restart(self, requests: Iterable[OpenRequest]) -> None:
        """Nothing that was sent counts any more: all of `requests` wait for their turn."""
        self.waiting = OrderedDict.fromkeys(requests)
        self._bytes_by_unanswered.clear()
        self._unanswered_bytes = 0

    def add(self, request: OpenRequest) -> None:
        """`request` waits for its turn."""
        self.waiting[request] = None

    def pop(self) -> OpenRequest | None:
        """The next request to send, counted from here on; None if there is none or no room. One always has room."""
        request = next(iter(self.waiting), None)
        if request is None:
            return None
        num_unanswered, num_bytes = len(self._bytes_by_unanswered), request.num_bytes
        has_room = (
            num_unanswered < MAX_UNANSWERED_REQUESTS and self._unanswered_bytes + num_bytes <= MAX_UNANSWERED_BYTES
        )
        if num_unanswered and not has_room:
            return None
        del self.waiting[request]
        self._bytes_by_unanswered[request] = num_bytes
        self._unanswered_bytes += num_bytes
        return request

    def note_answered(self, request: OpenRequest) -> None:
        """The frontend answered what was sent of `request`; if it waits to be sent anew it goes on waiting."""
        self._unanswered_bytes -= self._bytes_by_unanswered.pop(request, 0)

    def remove(self, request: OpenRequest) -> None:
        """`request` has ended."""
        self.waiting.pop(request, None)
        self.note_answered(request)
