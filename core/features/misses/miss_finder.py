"""MissFinder: finds out for each request which tokens of its prompt could have been in the prefix cache and were not.

Only the first admission of a request is explained, and no resumed one. A request that has the whole prompt in the cache
costs one call; others cost a few lookups for each explained block, and for one block after them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from ....ipc.messages.base import MissReason
from ...request import Request
from ...scheduling.scheduler import Scheduler
from ...scheduling.step_feature import Engine, StepFeature, StepPlan
from ..tiers.offload import Offload
from .lost_blocks import LostBlocks
from .miss_walk import MissWalk
from .namespaces import Namespaces, mark_of, tenant_of

LOST_PER_BLOCK = 64  # remembered losses for each block of the pool
MOST_LOST = 1 << 20  # 26 MB


class MissFinder(StepFeature):
    """Owner of the walks over the prompts that are being computed, and of the memory of lost blocks."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        offload: Offload | None = None,
        clock: Callable[[], float] = time.monotonic,
        most_lost: int = MOST_LOST,
    ) -> None:
        self._engine, self._offload = engine, offload
        self._kv_cache, self._rows = scheduler.kv_cache, scheduler.rows
        kv_cache = scheduler.kv_cache
        num_entries = min(LOST_PER_BLOCK * kv_cache.num_usable_blocks, most_lost)
        self._lost = LostBlocks(num_entries, self._mark, clock, is_state=kv_cache.groups[0].is_state)
        kv_cache.pool.add_loss_observer(self._lost)
        self._has_state = any(group.is_state for group in kv_cache.groups)
        self._namespaces = Namespaces()
        self._marked: Request | None = None
        self._mark_of_it = 0
        self._walks: dict[Request, MissWalk] = {}  # in the order of admission, until the prompt is computed
        self.num_missed = Counter[MissReason]()  # tokens

    def _mark(self) -> int:
        filling = self._kv_cache.filling
        if filling is not self._marked:
            self._marked = filling
            self._mark_of_it = 0 if filling is None else mark_of(tenant_of(filling))
        return self._mark_of_it

    def admit(self, request: Request, num_computed: int) -> None:
        if request.has_misses_known or request.num_output_tokens or request.cache_root is not None:
            return
        request.has_misses_known = True
        kv_cache = self._kv_cache
        size, num_readable = kv_cache.block_size, kv_cache.num_readable_blocks(request)
        index = num_computed // size
        walk = MissWalk(request, index, num_readable, kv_cache, self._lost, self._namespaces)
        if index >= request.num_prompt_tokens // size:
            return
        if not kv_cache.sizes.are_full:
            found = index
            while found < num_readable and kv_cache.has(0, kv_cache.key(request, found)):
                found += 1
            walk.explain(found, "state" if self._has_state else "window")
        if self._offload is not None:
            walk.explain(min(self._offload.found_end(request), walk.num_blocks), "tier")
        self._walks[request] = walk

    def plan(self, step: StepPlan) -> None:
        """Explain the blocks that the step is going to compute."""
        if not self._walks:
            return
        key, size = self._kv_cache.key, self._kv_cache.block_size
        in_step: dict[bytes, list[Request]] = {}
        for walk in [*self._walks.values()]:
            request = walk.request
            if count := int(step.counts[request.row]):
                first = int(self._rows.num_scheduled[request.row])
                num_tokens = min(first + count, request.num_prompt_tokens)
                end = num_tokens // size
                walk.advance(end, in_step)
                if first // size < end and len(self._walks) > 1:
                    in_step.setdefault(key(request, first // size), []).append(request)
                if num_tokens == request.num_prompt_tokens:
                    self._close(walk)

    def _close(self, walk: MissWalk) -> None:
        del self._walks[walk.request]
        misses = walk.report(self._lost.forgets_before)
        if misses.num_tokens:
            self.num_missed.update(misses.num_tokens)
            self._engine.report_misses(walk.request, misses)

    def leave(self, request: Request, last_step: int) -> None:
        if (walk := self._walks.get(request)) is not None:
            self._close(walk)

    def reset(self, lost: object) -> None:
        """Record that all blocks are lost: the workers have ended, or their memory is about to change."""
        for key in self._kv_cache.pool.keys:
            self._lost.add(key, "lost")

    def report(self) -> dict[str, dict[MissReason, int]]:
        return {"num_missed_tokens": dict(self.num_missed)}
