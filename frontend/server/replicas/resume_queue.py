"""ResumeQueue: requests that have lost their core, or found none, in the order of their arrival."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

RequestT = TypeVar("RequestT")


class ResumeQueue(Generic[RequestT]):
    """Heap with lazy removal: a request that no longer waits is skipped when it comes first."""

    def __init__(self, waits: Callable[[RequestT], bool]) -> None:
        """waits: whether a request still waits for a core, that is, has neither ended nor been given one."""
        self._waits = waits
        self._heap: list[tuple[float, int, RequestT]] = []
        self._tie = itertools.count()

    def add(self, arrived_at: float, request: RequestT) -> None:
        heapq.heappush(self._heap, (arrived_at, next(self._tie), request))

    @property
    def first(self) -> RequestT | None:
        """The waiting request that arrived first; None if there is none."""
        while self._heap and not self._waits(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Remove the request that `first` has just returned."""
        heapq.heappop(self._heap)
