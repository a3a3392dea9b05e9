"""SlabPool: the pool of a KV group that shares the memory with others.

Block k of each group is the bytes [k·b, (k+1)·b) of one memory, with b the group's own block size. The memory is cut
into slabs, and only blocks that lie wholly in slabs of their group exist for requests. Knows no other group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain

from ...ipc.kv.pool_shape import PoolShape
from .block_pool import BlockObserver, BlockPool
from .reuse_order import FullestFirst, FullestOfOlder, SpareBlocks, UsefulBlocks

EMPTY = -1  # stamp of last use of a slab without content


class SlabPool(BlockPool):
    """A BlockPool that has the blocks of the slabs that were granted to it.

    Invariant: a slab is idle if none of its blocks is referenced; `num_idle` and `num_idle_blocks` count idle slabs and
    their blocks."""

    def __init__(self, shape: PoolShape, observers: Sequence[BlockObserver] = (), group: int = 0) -> None:
        self._slab_bytes = shape.slab_bytes
        self._block_bytes = shape.block_bytes[group]
        self._num_used: dict[int, int] = {}  # by granted slab: referenced blocks
        self._idle: list[tuple[int, int]] = []  # heap of (stamp of last use, slab): each idle slab, and outdated pairs
        self.num_idle = self.num_idle_blocks = 0
        empty, demoted, older = [FullestFirst(self._num_used, self._slab_bytes, self._block_bytes) for _ in range(3)]
        self._spares = (empty, demoted)
        self._useful = FullestOfOlder(older)
        self._by_slab = (empty, demoted, older)
        super().__init__(shape.num_blocks(group), observers, group=group)

    def _new_spares(self) -> tuple[SpareBlocks, SpareBlocks]:
        return self._spares

    def _new_useful(self) -> UsefulBlocks:
        return self._useful

    def _reuses_demoted(self) -> bool:
        """Prefer blocks of slabs that are in use, so that others stay idle: first demoted ones, then useful ones of the
        older half."""
        _, demoted = self._spares
        return len(demoted) > 0 and (demoted.has_used() or not self._useful.has_used())

    @property
    def num_used(self) -> int:
        """The number of referenced blocks."""
        return sum(self._num_used.values())

    @property
    def slabs(self) -> list[int]:
        return list(self._num_used)

    @property
    def num_slabs(self) -> int:
        return len(self._num_used)

    @property
    def blocks_per_slab(self) -> int:
        """The smallest number of blocks that lie wholly in a slab."""
        return self._slab_bytes // self._block_bytes - (self._slab_bytes % self._block_bytes > 0)

    def slab_of(self, block: int) -> int:
        """Return the slab in which the block begins."""
        return block * self._block_bytes // self._slab_bytes

    def ids_of(self, slab: int) -> range:
        """Return the blocks that lie wholly in the slab."""
        first = slab * self._slab_bytes
        return range(-(-first // self._block_bytes), (first + self._slab_bytes) // self._block_bytes)

    def grant(self, slab: int) -> None:
        """Add the blocks of a slab, all free and without content."""
        self._num_used[slab] = 0
        for block in self.ids_of(slab):
            self._empty.append(block)
        self._note_idle(slab, 1)

    def restore(self, key_by_block: dict[int, bytes]) -> None:
        """Add content that free blocks of granted slabs have already; skip other blocks."""
        for block, key in key_by_block.items():
            if block in self._empty and key not in self._block_by_key:
                self._empty.remove(block)
                self._restore(block, key)

    def revoke(self, slab: int) -> None:
        """Remove the blocks of an idle slab; their content leaves the index."""
        assert self._num_used[slab] == 0, f"slab {slab} has referenced blocks"
        for block in self.ids_of(slab):
            if self._key_by_block[block] is None:
                self._empty.remove(block)
                continue
            is_demoted = self._free.pop(block, None) is None
            if is_demoted:
                self._demoted.remove(block)
            self._report_evicted(block, is_demoted=is_demoted)
        del self._num_used[slab]
        self.num_idle -= 1
        self.num_idle_blocks -= len(self.ids_of(slab))

    def oldest_idle(self) -> tuple[int, int] | None:
        """Return (stamp of last use, slab) of the idle slab that was used longest ago; None if no slab is idle."""
        while self._idle:
            stamp, slab = self._idle[0]
            if self._num_used.get(slab) != 0:
                heappop(self._idle)
            elif (last_use := self._last_use(slab)) == stamp:
                return stamp, slab
            else:
                heapreplace(self._idle, (last_use, slab))
        return None

    def _last_use(self, slab: int) -> int:
        """Return the largest stamp of the blocks with content of an idle slab."""
        keys, free = self._key_by_block, self._free
        return max((free.get(block, 0) for block in self.ids_of(slab) if keys[block] is not None), default=EMPTY)

    def _note_idle(self, slab: int, change: int) -> None:
        self.num_idle += change
        self.num_idle_blocks += change * len(self.ids_of(slab))
        if change > 0:
            heappush(self._idle, (self._last_use(slab), slab))
            if len(self._idle) > 64 + 4 * len(self._num_used):
                self._idle = [(self._last_use(each), each) for each, count in self._num_used.items() if not count]
                heapify(self._idle)

    def _count(self, block: int, change: int) -> None:
        """Count a block that becomes referenced (1) or free (-1)."""
        slab = self.slab_of(block)
        count = self._num_used[slab]
        self._num_used[slab] = count + change
        for blocks in self._by_slab:
            blocks.recount(slab, count, count + change)
        if count == 0 or count + change == 0:
            self._note_idle(slab, -change)

    def allocate(self, count: int) -> list[int] | None:
        blocks = super().allocate(count)
        for block in blocks or ():
            self._count(block, 1)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._ref_count[block] == 0:
                self._count(block, 1)
            super().touch((block,))

    def free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            super().free((block,))
            if self._ref_count[block] == 0:
                self._count(block, -1)

    def demote(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().demote(blocks)
        for slab in {self.slab_of(block) for block in blocks if self._ref_count[block] == 0}:
            if not self._num_used[slab]:
                heappush(self._idle, (self._last_use(slab), slab))

    def state_at(self, place: int) -> int:
        """Return the state, as in `sample`, of the block at a byte of the memory."""
        return self._state(min(place // self._block_bytes, self.num_blocks - 1))

    @property
    def used(self) -> list[int]:
        """The referenced blocks."""
        return [block for block, count in enumerate(self._ref_count) if count]

    def room_after(self, released: Iterable[int], taken: Iterable[int] = ()) -> tuple[int, int, int]:
        """Return how many blocks are free, how many slabs are idle, and how many blocks these have, once the last
        references to the blocks `released` are gone and the free blocks `taken` are referenced."""
        num_free, num_idle, num_idle_blocks = self.num_free, self.num_idle, self.num_idle_blocks
        changes = Counter(map(self.slab_of, taken))
        changes.subtract(map(self.slab_of, released))
        for slab, change in changes.items():
            count = self._num_used[slab]
            is_more_idle = (count + change == 0) - (count == 0)
            num_free -= change
            num_idle += is_more_idle
            num_idle_blocks += is_more_idle * len(self.ids_of(slab))
        return num_free, num_idle, num_idle_blocks

    def _ids(self) -> Iterable[int]:
        return chain.from_iterable(map(self.ids_of, self._num_used))

    def check_invariants(self, tables: Iterable[Iterable[int]]) -> None:
        super().check_invariants(tables)
        used = dict.fromkeys(self._num_used, 0)
        for block, count in enumerate(self._ref_count):
            if count:
                used[self.slab_of(block)] += 1
        assert used == self._num_used, "wrong numbers of referenced blocks"
        for blocks in self._by_slab:
            blocks.check_invariants()
        self._useful.check_invariants()
        idle = [slab for slab, count in used.items() if not count]
        assert self.num_idle == len(idle) and self.num_idle_blocks == sum(len(self.ids_of(s)) for s in idle)
        assert set(idle) <= {slab for _, slab in self._idle}, "an idle slab cannot be found"
