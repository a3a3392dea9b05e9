"""Pins: keeps the cached blocks of prompts for as long as their requests ask (prompt_cache_retention, cache_control).

A pinned block stays free, so that nobody waits for it, but is reused after all other free blocks, until its time is
over. Each use of the prompt by such a request begins the time again. All pins together have at most SHARE of the pool,
and a tenant its part of that, by weight among the tenants with pins; its oldest pins go first. Pools of several KV
groups keep their own order: there the hints have no effect.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from ...ipc.params.sampling_params import RETENTION_S
from ...ipc.process.awake_clock import AwakeClock
from ..request import Request
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_feature import StepFeature
from ..tenant import Tenant

SHARE = 0.5  # of the pool's blocks
_MOST_OLD = 1024  # entries of `_ends` that count no more, beside one for each pin


class Pins(StepFeature):
    """Owner of the pins: by tenant, the end of each one's time and its block by key, in the order of last use.
    Invariant: a tenant has at most `_most` pins, and each pinned key is that of its block in the pool."""

    def __init__(self, scheduler: Scheduler, clock: AwakeClock) -> None:
        self._kv_cache, self._tenants, self._clock = scheduler.kv_cache, scheduler.tenants, clock
        self._pins: dict[Tenant, OrderedDict[bytes, tuple[float, int]]] = {}  # none is empty
        self._tenant_by_key: dict[bytes, Tenant] = {}
        self._ends: list[tuple[float, bytes]] = []  # a heap; an entry counts if it is the end of the pin
        self._kv_cache.pool.add_loss_observer(self)

    def leave(self, request: Request, last_step: int) -> None:
        seconds = RETENTION_S.get(request.params.prompt_cache_retention or "", 0.0)
        if not seconds or len(self._kv_cache.pools) > 1:
            return
        until, pool = self._clock.now + seconds, self._kv_cache.pool
        keys = request.block_keys[: request.num_prompt_tokens // self._kv_cache.block_size]
        if not keys:
            return
        is_new = request.tenant not in self._pins
        pins = self._pins.setdefault(request.tenant, OrderedDict())
        for key in keys[: self._most(request.tenant)]:  # the first blocks: without them the others are not found
            block = pool.lookup(key)
            if block is None:
                break
            self._pin(request.tenant, key, block, until)
        if not pins:
            del self._pins[request.tenant]
        for tenant in [*self._pins] if is_new else [request.tenant]:
            self._keep_to_part(tenant)

    def _pin(self, tenant: Tenant, key: bytes, block: int, until: float) -> None:
        owner = self._tenant_by_key.setdefault(key, tenant)
        known = self._pins[owner].get(key)
        if known is not None:
            until = max(until, known[0])
        self._pins[owner][key] = until, block
        self._pins[owner].move_to_end(key)
        heapq.heappush(self._ends, (until, key))
        if len(self._ends) > 2 * len(self._tenant_by_key) + _MOST_OLD:
            self._ends = [(end, each) for pins in self._pins.values() for each, (end, _) in pins.items()]
            heapq.heapify(self._ends)
        self._kv_cache.pool.keep(block)

    def _most(self, tenant: Tenant) -> int:
        """Return how many pins a tenant may have."""
        others = sum(self._tenants.weight(each) for each in self._pins if each is not tenant)
        weight = self._tenants.weight(tenant)
        return int(SHARE * self._kv_cache.num_usable_blocks * weight / (weight + others))

    def _keep_to_part(self, tenant: Tenant) -> None:
        most = self._most(tenant)
        while tenant in self._pins and len(self._pins[tenant]) > most:
            self._unpin(next(iter(self._pins[tenant])))

    def _unpin(self, key: bytes) -> None:
        tenant = self._tenant_by_key.pop(key, None)
        if tenant is None:
            return
        _, block = self._pins[tenant].pop(key)
        if not self._pins[tenant]:
            del self._pins[tenant]
        self._kv_cache.pool.release_kept(block)

    def next_deadline(self) -> float | None:
        return self._ends[0][0] if self._ends else None

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            until, key = heapq.heappop(self._ends)
            tenant = self._tenant_by_key.get(key)
            if tenant is not None and self._pins[tenant][key][0] <= until:
                self._unpin(key)

    # ── losses of the pool ───────────────────────────────────────────────────────────────────────────────────────

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        self._unpin(key)

    def forgotten(self, group: int, block: int, key: bytes) -> None:
        self._unpin(key)

    def cleared(self, group: int) -> None:
        for key in [*self._tenant_by_key]:
            self._unpin(key)

    def check_invariants(self, requests: Sequence[Request]) -> None:
        pinned = {key: block for pins in self._pins.values() for key, (_, block) in pins.items()}
        assert all(pins and len(pins) <= self._most(tenant) for tenant, pins in self._pins.items())
        assert pinned.keys() == self._tenant_by_key.keys()
        assert all(self._kv_cache.pool.holds(block, key) for key, block in pinned.items())
        assert len(pinned) <= SHARE * self._kv_cache.num_usable_blocks
        assert len(self._ends) <= 2 * len(pinned) + _MOST_OLD + 1
