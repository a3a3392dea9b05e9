"""SubmitWindow: flow control of submits. It limits the requests and bytes that are sent but not yet answered.

Requests beyond the window wait as objects; their messages are encoded when they are sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .open_request import OpenRequest

MAX_UNANSWERED_REQUESTS = 2048
MAX_UNANSWERED_BYTES = 16 << 20


class SubmitWindow:
    """The queue of requests to submit, and the sizes of unanswered requests. Invariant: no request is in both."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[OpenRequest, None] = OrderedDict()  # a FIFO with removal from the middle
        self._bytes_by_unanswered: dict[OpenRequest, int] = {}
        self._unanswered_bytes = 0

    def restart(self, requests: Iterable[OpenRequest]) -> None:
        """Empty the queue and the window, and queue `requests`."""
        self.waiting = OrderedDict.fromkeys(requests)
        self._bytes_by_unanswered.clear()
        self._unanswered_bytes = 0

    def add(self, request: OpenRequest) -> None:
        self.waiting[request] = None

    def pop(self) -> OpenRequest | None:
        """Move the next request from the queue to the window, and return it to be sent; None if none waits or the
        window is full.

        A request of any size fits into an empty window.
        """
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
        """Remove a request, which the frontend has answered, from the window; if it is queued, it stays queued."""
        self._unanswered_bytes -= self._bytes_by_unanswered.pop(request, 0)

    def remove(self, request: OpenRequest) -> None:
        """Remove an ended request from queue and window."""
        self.waiting.pop(request, None)
        self.note_answered(request)
