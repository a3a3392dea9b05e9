"""SubmitWindow: which requests wait to be (re)submitted and how much of what was sent is still unanswered.

What a slow frontend has not answered is bounded in requests and bytes; the rest waits here as the caller's own
objects, so that it costs no copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .open_request import OpenRequest

MAX_UNANSWERED_REQUESTS = 2048
MAX_UNANSWERED_BYTES = 16 << 20


class SubmitWindow:
    """Invariant: `is_waiting` ⇔ in `_waiting`; the two counts are those of the requests that are `is_unanswered`."""

    def __init__(self) -> None:
        self._waiting: deque[OpenRequest] = deque()
        self._num_unanswered = 0
        self._unanswered_bytes = 0

    def add(self, request: OpenRequest) -> None:
        """`request` waits for its turn."""
        request.is_unanswered = False
        request.is_waiting = True
        self._waiting.append(request)

    def restart(self, requests: Iterable[OpenRequest]) -> None:
        """Nothing that was sent counts any more: all of `requests` wait for their turn."""
        self._waiting.clear()
        self._num_unanswered = self._unanswered_bytes = 0
        for request in requests:
            self.add(request)

    def pop(self) -> OpenRequest | None:
        """The next request to send, counted from here on; None if there is none or no room. One always has room."""
        while self._waiting and self._waiting[0].is_finished:
            self._waiting.popleft()
        if not self._waiting:
            return None
        num_bytes = self._waiting[0].num_bytes
        is_full = (
            self._num_unanswered >= MAX_UNANSWERED_REQUESTS or self._unanswered_bytes + num_bytes > MAX_UNANSWERED_BYTES
        )
        if is_full and self._num_unanswered:
            return None
        request = self._waiting.popleft()
        request.is_waiting = False
        request.is_unanswered = True
        request.unanswered_bytes = num_bytes
        self._num_unanswered += 1
        self._unanswered_bytes += num_bytes
        return request

    def note_answered(self, request: OpenRequest) -> None:
        """The frontend answered `request`: its place is free."""
        if request.is_unanswered:
            request.is_unanswered = False
            self._num_unanswered -= 1
            self._unanswered_bytes -= request.unanswered_bytes
