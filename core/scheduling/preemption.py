"""Preemption: chooses the running requests that give way to another one.

Only requests that come later in the policy's order give way, the cheapest first. Requests of the flex class, which come
last, give way first, and under every policy. If API keys share the engine, requests of a key with more than its part of
rows or blocks give way to those of one with less, whatever their order. Changes nothing: the scheduler preempts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..kv.manager import KVCacheManager
from ..request import Request
from ..tenant import Tenant
from .step.rows import Rows
from .tenants import Tenants

MAX_VICTIMS_PER_STEP = 8  # running requests of its own class that are preempted for waiting ones in one step


class Preemption:
    """Choice of the requests to preempt. Reads the rows, the tenants and the pool; owns nothing."""

    def __init__(self, rows: Rows, kv_cache: KVCacheManager, tenants: Tenants, *, is_by_priority: bool) -> None:
        """is_by_priority: a new request may take the place of running ones of its class that come after it."""
        self._rows, self._kv_cache, self._tenants = rows, kv_cache, tenants
        self._most_victims = MAX_VICTIMS_PER_STEP if is_by_priority else 0

    def may_help(self, num_victims: int) -> bool:
        """Return whether waiting requests may still preempt others in a step that has had `num_victims` victims."""
        return num_victims < self._most_victims or self._rows.num_flex > 0 or self._tenants.are_several

    def victims(self, request: Request, num_victims: int) -> list[Request]:
        """Return the running requests to preempt so that `request`, which waits, gets a row and blocks: requests of the
        flex class for others, and of its own class, under the priority policy, MAX_VICTIMS_PER_STEP in a step; all
        strictly after it in order, cheapest first. If these do not suffice, requests of tenants that have more than
        their part, as many in a step. Empty if it fits without preemption or not even with it. num_victims: those of
        the step so far.

        A request that has run before preempts none of its class: a preempted request never preempts others to get its
        row back, and waiting requests cannot preempt one another in turn. Running requests that need a block preempt by
        `cheapest_behind`."""
        if not self.may_help(num_victims):
            return []
        choices = (self._behind, self._above_part) if self._tenants.are_several else (self._behind,)
        for choice in choices:
            if victims := self._enough(request, choice(request, num_victims)):
                return victims
        return []

    def _enough(self, request: Request, candidates: list[Request]) -> list[Request]:
        """Return so many of `candidates` that their rows and blocks suffice for `request`; empty if none is needed, or
        all of them do not suffice."""
        if not candidates:
            return []
        computed = self._kv_cache.get_computed_blocks(request)
        num_missing = self._kv_cache.num_missing(request, computed, self._rows.num_active)
        has_row = self._rows.has_free
        victims: list[Request] = []
        for victim in candidates:
            if has_row and num_missing <= 0:
                break
            victims.append(victim)
            num_reserved = self._rows.num_active - len(victims)
            num_missing = self._kv_cache.num_missing(request, computed, num_reserved, victims)
            has_row = True
        return victims if has_row and num_missing <= 0 else []

    def _behind(self, request: Request, num_victims: int) -> list[Request]:
        """Return the running requests after `request` in order that may give way to it, cheapest first."""
        if request.sort_key >= self._rows.sort_key.max():
            return []
        behind = [other for other in self._rows.requests() if other.sort_key > request.sort_key]
        most = 0
        if request.num_cached_tokens < 0:
            most = max(self._most_victims - num_victims, 0)
        if not request.is_flex:
            most += self._rows.num_flex
        return sorted(behind, key=self._cost)[:most]

    def _above_part(self, request: Request, num_victims: int) -> list[Request]:
        """Return the running requests, of the same class and no higher priority, of tenants that have more than their
        part of the rows or, if a row is free, of the blocks, cheapest first; empty if the tenant of `request` would
        have more than its part with it. No tenant gets below its part."""
        if self._rows.has_free:
            amount, most = _num_blocks, self._kv_cache.num_usable_blocks
            needed = self._kv_cache.sizes.num_blocks_for(request.num_tokens)
        else:
            amount, most, needed = _one_row, len(self._rows.request_by_row), 1
        held, part = self._held_by_tenant(amount), self._tenants.part
        if held[request.tenant] + needed > part(request.tenant) * most:
            return []
        found: list[Request] = []
        for other in sorted(self._rows.requests(), key=self._cost):
            is_later = other.is_flex == request.is_flex and other.priority >= request.priority
            if is_later and held[other.tenant] - amount(other) >= part(other.tenant) * most:
                held[other.tenant] -= amount(other)
                found.append(other)
        return found[: max(MAX_VICTIMS_PER_STEP - num_victims, 0)]

    def _held_by_tenant(self, amount: Callable[[Request], int]) -> Counter[Tenant]:
        """Return the sum of `amount` over the running requests of each tenant."""
        held = Counter[Tenant]()
        for request in self._rows.requests():
            held[request.tenant] += amount(request)
        return held

    def cheapest_behind(self, request: Request) -> Request | None:
        """Return the running request after `request` in order that is cheapest to preempt, if possible of a tenant that
        holds more than its part of the blocks; None if there is none. Requests before it are never preempted, so the
        first in order always makes progress."""
        behind = [
            other for other in self._rows.requests() if (other.sort_key, other.key) > (request.sort_key, request.key)
        ]
        if self._tenants.are_several:
            held, most = self._held_by_tenant(_num_blocks), self._kv_cache.num_usable_blocks
            part = self._tenants.part
            above = {each for each, num in held.items() if num > min(part(each), each.kv_share) * most}
            behind = [other for other in behind if other.tenant in above] or behind
        return min(behind, key=self._cost, default=None)

    def _cost(self, request: Request) -> tuple[bool, int, int, float]:
        """Return the sort key of preemption, cheapest first: the flex class, lowest priority, fewest computed tokens,
        last in order."""
        num_computed = int(self._rows.num_scheduled[request.row])
        return not request.is_flex, -request.priority, num_computed, -request.sort_key


def _num_blocks(request: Request) -> int:
    return request.num_blocks


def _one_row(request: Request) -> int:
    return 1
