"""Deadlines of requests, in unix seconds. They count from the first arrival: a resubmission does not extend them."""

from __future__ import annotations

import heapq
import itertools

from .request import Request, State

MIN_SWEEP = 64  # entries in the heap before a sweep is worth it
MAX_EXPIRED = 256  # requests in one call of `expired`; others follow in the next turn


class Deadlines:
    """Requests by deadline, in a heap with lazy removal: entries that no longer apply are skipped when they surface,
    and swept when the heap has doubled."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, Request]] = []
        self._tie = itertools.count()
        self._sweep_at = MIN_SWEEP

    def add(self, request: Request) -> None:
        """Add the deadlines of a request, if it has any."""
        params = request.params
        if params.timeout_s is not None:
            self._push(request, request.arrival_time + params.timeout_s, in_queue=False)
        if params.queue_timeout_s is not None and request.num_output_tokens == 0:
            self._push(request, request.arrival_time + params.queue_timeout_s, in_queue=True)

    def _push(self, request: Request, when: float, in_queue: bool) -> None:
        heapq.heappush(self._heap, (when, next(self._tie), in_queue, request))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if _is_live(entry)]
            heapq.heapify(self._heap)
            self._sweep_at = max(2 * len(self._heap), MIN_SWEEP)

    def expired(self, now: float) -> list[Request]:
        """Remove the deadlines that have passed at `now` (unix seconds); return their requests, each once, at most
        MAX_EXPIRED. If more have passed, `next` stays in the past."""
        found: dict[int, Request] = {}
        while len(found) < MAX_EXPIRED and self._heap and (self._heap[0][0] <= now or not _is_live(self._heap[0])):
            entry = heapq.heappop(self._heap)
            if _is_live(entry):
                found[id(entry[3])] = entry[3]
        return list(found.values())

    @property
    def next(self) -> float | None:
        """Time at which to call `expired` next, in unix seconds; None if there are no deadlines."""
        return self._heap[0][0] if self._heap else None


def _is_live(entry: tuple[float, int, bool, Request]) -> bool:
    """Return whether the entry is still valid: its request is unfinished and, for a queue deadline, never had a row."""
    _, _, in_queue, request = entry
    if request.state is State.FINISHED:
        return False
    return not in_queue or (request.state is State.WAITING and request.num_cached_tokens < 0)
