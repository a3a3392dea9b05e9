"""Preemption: chooses the running requests that give way to another one.

Only requests that come later in the policy's order give way, the cheapest first. Changes nothing: the scheduler
preempts.
"""

from __future__ import annotations

from ..kv.manager import KVCacheManager
from ..request import Request
from .step.rows import Rows


class Preemption:
    """Choice of the requests to preempt. Reads the rows and the pool; owns nothing."""

    def __init__(self, rows: Rows, kv_cache: KVCacheManager) -> None:
        self._rows, self._kv_cache = rows, kv_cache

    def victims(self, request: Request, limit: int) -> list[Request]:
        """Return the running requests to preempt so that `request`, which waits, gets a row and blocks: at most
        `limit`, all strictly after it in the policy's order, cheapest first. Empty if it fits without preemption or not
        even with it, and for a request that has run before.

        So a preempted request never preempts others to get its row back, and waiting requests cannot preempt one
        another in turn. Running requests that need a block preempt by `cheapest_behind`."""
        if not limit or request.num_cached_tokens >= 0 or request.sort_key >= self._rows.sort_key.max():
            return []
        computed = self._kv_cache.get_computed_blocks(request)
        num_missing = self._kv_cache.num_missing(request, computed, self._rows.num_active)
        has_row = self._rows.has_free
        victims: list[Request] = []
        behind = [other for other in self._rows.requests() if other.sort_key > request.sort_key]
        for victim in sorted(behind, key=self._cost)[:limit]:
            if has_row and num_missing <= 0:
                break
            victims.append(victim)
            num_reserved = self._rows.num_active - len(victims)
            num_missing = self._kv_cache.num_missing(request, computed, num_reserved, victims)
            has_row = True
        return victims if has_row and num_missing <= 0 else []

    def cheapest_behind(self, request: Request) -> Request | None:
        """Return the running request after `request` in order that is cheapest to preempt; None if there is none.
        Requests before it are never preempted, so the first in order always makes progress."""
        behind = [
            other for other in self._rows.requests() if (other.sort_key, other.key) > (request.sort_key, request.key)
        ]
        return min(behind, key=self._cost, default=None)

    def _cost(self, request: Request) -> tuple[int, int, float]:
        """Return the sort key of preemption, cheapest first: lowest priority, fewest computed tokens, last in
        order."""
        return -request.priority, int(self._rows.num_scheduled[request.row]), -request.sort_key
