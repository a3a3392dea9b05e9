"""Preemption: chooses the running requests that give way to another one.

Only requests that come later in the policy's order give way, the cheapest first. Requests of the flex class, which come
last, give way first, and under every policy. Changes nothing: the scheduler preempts.
"""

from __future__ import annotations

from ..kv.manager import KVCacheManager
from ..request import Request
from .step.rows import Rows

MAX_VICTIMS_PER_STEP = 8  # running requests of its own class that are preempted for waiting ones in one step


class Preemption:
    """Choice of the requests to preempt. Reads the rows and the pool; owns nothing."""

    def __init__(self, rows: Rows, kv_cache: KVCacheManager, *, is_by_priority: bool) -> None:
        """is_by_priority: a new request may take the place of running ones of its class that come after it."""
        self._rows, self._kv_cache = rows, kv_cache
        self._most_victims = MAX_VICTIMS_PER_STEP if is_by_priority else 0

    def may_help(self, num_victims: int) -> bool:
        """Return whether waiting requests may still preempt others in a step that has had `num_victims` victims."""
        return num_victims < self._most_victims or self._rows.num_flex > 0

    def victims(self, request: Request, num_victims: int) -> list[Request]:
        """Return the running requests to preempt so that `request`, which waits, gets a row and blocks: requests of the
        flex class for others, and of its own class, under the priority policy, MAX_VICTIMS_PER_STEP in a step; all
        strictly after it in order, cheapest first. Empty if it fits without preemption or not even with it.
        num_victims: those of the step so far.

        A request that has run before preempts none of its class: a preempted request never preempts others to get its
        row back, and waiting requests cannot preempt one another in turn. Running requests that need a block preempt by
        `cheapest_behind`."""
        if not self.may_help(num_victims) or request.sort_key >= self._rows.sort_key.max():
            return []
        computed = self._kv_cache.get_computed_blocks(request)
        num_missing = self._kv_cache.num_missing(request, computed, self._rows.num_active)
        has_row = self._rows.has_free
        victims: list[Request] = []
        behind = [other for other in self._rows.requests() if other.sort_key > request.sort_key]
        most = 0
        if request.num_cached_tokens < 0:
            most = max(self._most_victims - num_victims, 0)
        if not request.is_flex:
            most += self._rows.num_flex
        for victim in sorted(behind, key=self._cost)[:most]:
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

    def _cost(self, request: Request) -> tuple[bool, int, int, float]:
        """Return the sort key of preemption, cheapest first: the flex class, lowest priority, fewest computed tokens,
        last in order."""
        num_computed = int(self._rows.num_scheduled[request.row])
        return not request.is_flex, -request.priority, num_computed, -request.sort_key
