"""WaitingQueue: the waiting requests, in the policy's order.

A heap for each tenant, with lazy removal: an aborted request is skipped when it surfaces. A request with a WaitReason
stays outside the heaps until `release` has removed its last reason.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ..request import Request, State, WaitReason
from ..tenant import Tenant
from .tenants import Tenants


class Waiting(NamedTuple):
    """How many requests wait, and the sum of their known tokens."""

    num_requests: int
    num_tokens: int


class WaitingQueue:
    """Queue that holds each waiting request once. `num_tokens` is the sum of their known tokens."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._heaps: dict[Tenant, list[tuple[float, int, Request]]] = {}  # none is empty
        self._num_queued = 0  # entries in all heaps
        self._tie = itertools.count()
        self._blocked: set[Request] = set()
        self._num_left = 0  # entries in the heaps of requests that have left
        self.num_tokens = 0
        self.num_with_media = 0
        self.num_flex = self._num_flex_tokens = 0

    def __len__(self) -> int:
        return self._num_queued - self._num_left + len(self._blocked)

    @property
    def num_blocked(self) -> int:
        """Number of requests with a WaitReason."""
        return len(self._blocked)

    @property
    def num_ready_flex(self) -> int:
        """Number of requests of the flex class without a WaitReason."""
        return self.num_flex - sum(request.is_flex for request in self._blocked)

    @property
    def num_ready_others(self) -> int:
        """Number of requests of other classes without a WaitReason."""
        if len(self) == self.num_flex:
            return 0
        return len(self) - len(self._blocked) - self.num_ready_flex

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all waiting requests, in no particular order."""
        entries = itertools.chain.from_iterable(self._heaps.values())
        queued = (request for _, _, request in entries if request.state is State.WAITING)
        return itertools.chain(queued, self._blocked)

    def _count(self, request: Request, sign: int) -> None:
        self.num_tokens += sign * request.num_tokens
        request.tenant.num_waiting += sign
        request.tenant.num_waiting_tokens += sign * request.num_tokens
        self.num_with_media += sign * bool(request.media)
        if request.is_flex:
            self.num_flex += sign
            self._num_flex_tokens += sign * request.num_tokens

    def count_of(self, *, is_flex: bool) -> Waiting:
        """Count the waiting requests of the flex class, or all others."""
        if is_flex:
            return Waiting(self.num_flex, self._num_flex_tokens)
        return Waiting(len(self) - self.num_flex, self.num_tokens - self._num_flex_tokens)

    def add(self, request: Request) -> None:
        self._count(request, 1)
        if request.waits_for:
            self._blocked.add(request)
        else:
            self._push(request)

    def _push(self, request: Request) -> None:
        heap = self._heaps.setdefault(request.tenant, [])
        heapq.heappush(heap, (request.sort_key, next(self._tie), request))
        self._num_queued += 1

    def release(self, request: Request, reason: WaitReason) -> None:
        """Remove one reason to wait from a request; if it has none left and is in the queue, `pop` can return it."""
        request.waits_for.discard(reason)
        if request in self._blocked and not request.waits_for:
            self._blocked.remove(request)
            self._push(request)

    def pop(self) -> Request | None:
        """Remove and return the first request in order that has no WaitReason, or None; requests of tenants that are
        full are passed over. Of those that are the first of
        their tenants, and of the first one's class and priority, it is that of the tenant that was served least."""
        while self._heaps:
            heap = self._next_heap()
            if heap is None:
                return None
            _, _, request = heapq.heappop(heap)
            self._num_queued -= 1
            if not heap:
                del self._heaps[request.tenant]
            if request.state is State.WAITING:
                self._count(request, -1)
                return request
            self._num_left -= 1
        return None

    def _next_heap(self) -> list[tuple[float, int, Request]] | None:
        heaps = [heap for tenant, heap in self._heaps.items() if not self._tenants.is_full(tenant)]
        if len(heaps) <= 1:
            return heaps[0] if heaps else None
        level = min(heap[0] for heap in heaps)[2].level
        return min(
            (heap for heap in heaps if heap[0][2].level == level),
            key=lambda heap: (self._tenants.served(heap[0][2].tenant), heap[0]),
        )

    def forget(self, request: Request) -> None:
        """Remove a request that finished while it waited here; its heap entry goes when it surfaces or is swept."""
        self._count(request, -1)
        if request in self._blocked:
            self._blocked.remove(request)
            return
        self._num_left += 1
        if self._num_left > 64 and 2 * self._num_left > self._num_queued:
            self._sweep()

    def _sweep(self) -> None:
        """Remove the entries of requests that have left."""
        left = [[entry for entry in heap if entry[2].state is State.WAITING] for heap in self._heaps.values()]
        self._heaps = {heap[0][2].tenant: heap for heap in left if heap}
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._num_queued, self._num_left = sum(map(len, self._heaps.values())), 0
