"""PoolLoads: copies blocks from slots back into the pools, for admitted requests and to make room in the slots.

The next step makes the copies. They count as hits of the request that is admitted, by the places that the blocks came
from; hits in the pool make blocks due to be written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import accumulate
from typing import NamedTuple

from ...kv.block_hash import object_name
from ...kv.block_pool import NULL_BLOCK
from ...kv.computed import Computed
from ...kv.manager import KVCacheManager
from ...kv.outer_blocks import POOL
from ...request import Request
from .block_notes import BlockNotes
from .copy_plan import CopyPlan
from .fetch import Item
from .fetches import Fetches
from .hits import HOST
from .slots import Slots
from .write_behind import WriteBehind


class _Gap(NamedTuple):
    """A block that a request needs and only a slot has. entry: index among the blocks of the group that it needs."""

    group: int
    entry: int
    key: bytes
    slot: int


class PoolLoads:
    """Planner of the loads. Owns nothing; `notes` of the pools are by KV group."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        slots: Slots,
        plan: CopyPlan,
        notes: Sequence[BlockNotes],
        writes: WriteBehind,
        fetches: Fetches,
        max_bytes: int,
    ) -> None:
        """max_bytes: most that a step with running rows loads."""
        self._kv_cache, self._slots, self._plan, self._notes = kv_cache, slots, plan, notes
        self._pools, self._writes, self._fetches, self._max_bytes = kv_cache.pools, writes, fetches, max_bytes
        groups = kv_cache.groups
        self._windows_first = sorted(range(len(groups)), key=lambda group: groups[group].is_full)
        self.num_loaded = self.loaded_bytes = 0  # blocks, and their bytes

    def take(self, request: Request, computed: Computed, *, has_rows: bool) -> list[list[int]] | None:
        """Return by group the blocks that a request needs, all referenced, and count them as hits. Those that no pool
        has are loaded from their slots in the next step. None if there are too many for one step: then the first ones
        are copied to the pool, where a later call finds them.

        has_rows: other rows run, which limits the loads of a step. The pools have room for all blocks of the
        request."""
        needed = self._kv_cache.needed(computed.num_blocks)
        blocks = [list[int]() for _ in self._pools]
        gaps = list[_Gap]()
        for group in self._windows_first:
            table, slots = blocks[group], computed.places[group]
            found = iter(computed.blocks[group])
            for i in needed[group]:
                slot = slots.get(i)
                if slot is not None:
                    gaps.append(_Gap(group, len(table), self._kv_cache.key(request, i), slot))
                table.append(next(found) if slot is None else NULL_BLOCK)
        # All that was found is referenced before a block is allocated: the allocation evicts the content of a free
        # block, which may be one found here, and stores it in a free slot, which may be one found here. The plan takes
        # its own reference to each slot until the step is done, so these end below.
        for pool, table in zip(self._pools, blocks, strict=True):
            pool.touch(block for block in table if block)
        self._slots.touch(gap.slot for gap in gaps)
        try:
            num_loads = self._num_loads([gap.slot for gap in gaps], has_rows=has_rows)
            if num_loads < len(gaps):
                self._land_slots([(gap.group, gap.key, gap.slot) for gap in gaps[:num_loads]])
                for pool, table in zip(self._pools, blocks, strict=True):
                    pool.free(block for block in reversed(table) if block)
                return None
            for gap, block in zip(gaps, self._allocate([gap.group for gap in gaps]), strict=True):
                self._copy_back(gap.group, gap.slot, block, gap.key)
                blocks[gap.group][gap.entry] = block
        finally:
            self._slots.free(gap.slot for gap in reversed(gaps))
        self._count_hits(request, needed, blocks, {(gap.group, gap.entry) for gap in gaps})
        return blocks

    def _num_loads(self, slots: Sequence[int], *, has_rows: bool) -> int:
        """Return how many of these slots, from the first, may be loaded in one step; has_rows: rows run, and must not
        wait for long."""
        if not has_rows:
            return len(slots)
        sums = accumulate(map(self._slots.bytes_of, slots))
        return max(sum(num_bytes <= self._max_bytes for num_bytes in sums), min(len(slots), 1))

    def _allocate(self, groups: Sequence[int]) -> Iterator[int]:
        """Allocate a block of each of these groups; the memory must have room for them. Yield the blocks in order."""
        if groups:
            found = self._kv_cache.memory.allocate([groups.count(group) for group in range(len(self._pools))])
            assert found is not None, "num_missing has counted the blocks"
            left = [iter(each) for each in found]
            for group in groups:
                yield next(left[group])

    def _copy_back(self, group: int, slot: int, block: int, key: bytes) -> None:
        self._plan.load(slot, block)
        self._notes[group].arriving.add(block)
        self._notes[group].is_wanted[block] = True
        self._pools[group].cache_block(block, key)
        self.num_loaded += 1
        self.loaded_bytes += self._slots.bytes_of(slot)

    def _count_hits(
        self, request: Request, needed: Sequence[range], blocks: Sequence[Sequence[int]], loaded: Set[tuple[int, int]]
    ) -> None:
        """Count the first blocks of an admitted request as hits, and queue writes of those found in the pool that are
        due. needed, blocks: by group, their indexes and ids. loaded: (group, index in `blocks`) of those from slots."""
        first, end = min(each.start for each in needed), needed[0].stop
        places = [POOL] * end
        for group, notes in enumerate(self._notes):
            for index, (i, block) in enumerate(zip(needed[group], blocks[group], strict=True)):
                key, place = self._kv_cache.key(request, i), POOL
                if (group, index) in loaded:
                    place = HOST
                elif self._writes.targets and notes.is_sent[block]:
                    notes.is_wanted[block] = True
                    self._writes.see(group, block, key, notes.owner(block), is_computed=False)
                places[i] = max(places[i], self._fetches.hits.take_origin(object_name(key, group), place))
        if first < end:  # with windows alone, a block before them is found thanks to the first that is read
            places[:first] = [places[first]] * first
        self._fetches.hits.count(request, places)

    def land(self, num_rows: int) -> None:
        """Plan copies of loaded blocks to the pool, for requests that need more slots than there are, so that their
        slots become free. num_rows: number of running rows; as many free blocks of each group are left to them."""
        for fetch in self._fetches.stalled():
            held = fetch.held_items
            void = [item for item in held if self._slots.name_of(fetch.held[item.name]) != item.name]
            self._fetches.let_go(fetch, void)  # a lost step did not fill them
            held = [item for item in held if item.name in fetch.held]
            num_loads = self._num_loads([fetch.held[item.name] for item in held], has_rows=num_rows > 0)
            landed = held[: self._num_fitting(held[:num_loads], num_rows)]
            self._land_slots([(item.group, item.key, fetch.held[item.name]) for item in landed])
            self._fetches.let_go(fetch, landed)

    def _num_fitting(self, items: Sequence[Item], num_rows: int) -> int:
        """Return for how many of these blocks, from the first, the memory has room besides those that `num_rows` rows
        may need."""
        counts = self._kv_cache.sizes.reserve(num_rows)
        for index, item in enumerate(items):
            counts[item.group] += 1
            if self._kv_cache.memory.num_missing(counts) > 0:
                return index
        return len(items)

    def _land_slots(self, found: list[tuple[int, bytes, int]]) -> None:
        """Plan copies of slots into free blocks of the pools, where they can be found by their keys. The pools must
        have room for them. found: (group, key, slot) of each."""
        blocks = list(self._allocate([group for group, _, _ in found]))
        for block, (group, key, slot) in zip(blocks, found, strict=True):
            self._copy_back(group, slot, block, key)
            self._fetches.hits.note_origin(object_name(key, group), HOST)
        for block, (group, _, _) in zip(reversed(blocks), reversed(found), strict=True):
            self._pools[group].free((block,))
