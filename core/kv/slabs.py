"""Slabs: the owners of the parts of a memory that several KV groups share.

A group that needs a block and has no free one without content takes a slab that nobody owns, else the idle slab of
another group that was used longest ago, if that is longer ago than its own oldest block, else its own oldest block. Of
each group as many slabs stay as one request of the largest length needs: the first request always makes progress. Slab
0 has every group's null block and is never given away.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Protocol, TypeAlias

from ...ipc.kv.pool_shape import PoolShape
from .block_pool import BlockPool
from .slab_pool import SlabPool

Blocks: TypeAlias = Sequence[Sequence[int]]  # by group
Pending: TypeAlias = list[tuple[int, bytes]]  # (block · number of groups + group, key)


class Memory(Protocol):
    """Interface of the allocator of the blocks of all groups. Counts are by group."""

    def num_missing(self, counts: Sequence[int], released: Blocks | None = None, taken: Blocks | None = None) -> int:
        """Return how many slabs are missing to allocate `counts` blocks; 0 or less if they fit.

        released, taken: blocks that lose their last references before, and free blocks that get some."""
        ...

    def allocate_each(self, count: int) -> list[int] | None:
        """Allocate `count` blocks of each group, and return them, group by group; None, without allocating any, if they
        do not fit."""
        ...

    def allocate(self, counts: Sequence[int]) -> list[list[int]] | None:
        """Allocate `counts` blocks; see `allocate_each`."""
        ...

    def take_pending(self) -> Pending:
        """Return the blocks of all groups that were cached since the last call, as BlockPool.take_pending."""
        ...

    def mark_written(self, blocks: Pending) -> None:
        """Report these blocks as written; see BlockPool.mark_written."""
        ...

    def advance(self) -> None:
        """Let blocks that are freed from now on count as used later than all before."""
        ...

    def reset(self) -> None:
        """Begin anew. No block may be referenced or have content."""
        ...

    @property
    def num_free_bytes(self) -> int:
        """The bytes of blocks that no request references."""
        ...

    @property
    def num_moved_slabs(self) -> Sequence[int]:
        """How many slabs each group has taken from others."""
        ...

    def sample(self, count: int) -> bytes:
        """Return the states of at most `count` blocks, as BlockPool.sample, evenly spread over the memory."""
        ...

    def check_invariants(self) -> None:
        """Raise AssertionError unless the pools agree with one another."""
        ...


class WholePool:
    """Memory of a single group, whose pool has all blocks: a block is a slab."""

    num_moved_slabs = (0,)

    def __init__(self, pool: BlockPool, block_bytes: int) -> None:
        self._pool = pool
        self._block_bytes = block_bytes
        self.allocate_each = pool.allocate
        self.take_pending = pool.take_pending
        self.mark_written = pool.mark_written

    def allocate(self, counts: Sequence[int]) -> list[list[int]] | None:
        found = self._pool.allocate(counts[0])
        return None if found is None else [found]

    def num_missing(self, counts: Sequence[int], released: Blocks | None = None, taken: Blocks | None = None) -> int:
        num_missing = counts[0] - self._pool.num_free
        for blocks in taken or ():
            num_missing += len(blocks)
        for blocks in released or ():
            num_missing -= len(blocks)
        return num_missing

    def advance(self) -> None:
        pass

    def reset(self) -> None:
        pass

    @property
    def num_free_bytes(self) -> int:
        return self._pool.num_free * self._block_bytes

    def sample(self, count: int) -> bytes:
        return self._pool.sample(count)

    def check_invariants(self) -> None:
        pass


class Slabs:
    """Owner of the slabs that no group owns, and distributor of all. Invariant: each slab but 0 is unowned or in one
    pool, and each pool has at least its floor."""

    def __init__(
        self,
        shape: PoolShape,
        pools: Sequence[SlabPool],
        floors: Sequence[int],
        keys: Sequence[dict[int, bytes]] | None = None,
    ) -> None:
        """floors: number of slabs of each group that others never take; together with slab 0 they must fit. keys: by
        group, the keys of blocks that have content already."""
        self._shape = shape
        self._pools = pools
        self._floors = floors
        self.num_moved_slabs = [0] * len(pools)
        assert sum(floors) < shape.num_slabs, "the floors exceed the memory"
        unowned = set(range(1, shape.num_slabs))
        for pool, content in zip(pools, keys or [{}] * len(pools), strict=True):
            for slab in {pool.slab_of(block) for block in content} & unowned:
                unowned.remove(slab)
                pool.grant(slab)
            pool.restore(content)
        self._unowned = sorted(unowned, reverse=True)
        self._fill_floors()
        self.now = 1

    def _fill_floors(self) -> None:
        no_needs = [0] * len(self._pools)
        for group, floor in enumerate(self._floors):
            while self._pools[group].num_slabs < floor:
                is_taken = self._take(group, no_needs)
                assert is_taken, "the floors fit into an idle memory"

    def advance(self) -> None:
        self.now += 1
        for pool in self._pools:
            pool.now = self.now

    def num_missing(self, counts: Sequence[int], released: Blocks | None = None, taken: Blocks | None = None) -> int:
        none: Blocks = [()] * len(counts)
        num_missing = -len(self._unowned)
        changes = zip(self._pools, counts, self._floors, released or none, taken or none, strict=True)
        for pool, count, floor, *changed in changes:
            num_free, num_idle, num_idle_blocks = pool.room_after(*changed)
            size = pool.blocks_per_slab
            if count > num_free:
                num_missing += -(-(count - num_free) // size)
            else:
                num_kept = max(-(-(count - num_free + num_idle_blocks) // size), 0)
                num_missing -= max(min(num_idle - num_kept, pool.num_slabs - floor), 0)
        return num_missing

    def allocate_each(self, count: int) -> list[int] | None:
        found = self.allocate([count] * len(self._pools))
        return None if found is None else [*chain.from_iterable(found)]

    def allocate(self, counts: Sequence[int]) -> list[list[int]] | None:
        needs = list(counts)
        if any(count > pool.num_free for pool, count in zip(self._pools, counts, strict=True)):
            if self.num_missing(counts) > 0:
                return None
            for group, pool in enumerate(self._pools):
                while pool.num_free < needs[group]:
                    is_taken = self._take(group, needs)
                    assert is_taken, "num_missing has counted the slabs"
        found = []
        for group, pool in enumerate(self._pools):
            blocks = list[int]()
            while needs[group]:
                if not pool.has_empty:
                    self._take(group, needs, before=pool.oldest_stamp)
                blocks += pool.allocate(1) or ()
                needs[group] -= 1
            found.append(blocks)
        return found

    def _take(self, group: int, needs: Sequence[int], before: int | None = None) -> bool:
        """Grant a group one more slab, and return True; False if there is none, or none that was used before the stamp
        `before`. needs: by group, the number of free blocks that it must keep."""
        if self._unowned:
            self._pools[group].grant(self._unowned.pop())
            return True
        oldest = None
        for other, pool in enumerate(self._pools):
            if other == group or pool.num_slabs <= self._floors[other]:
                continue
            found = pool.oldest_idle()
            if found is None or (before is not None and found[0] >= before) or (oldest and found >= oldest[:2]):
                continue
            if pool.num_free - len(pool.ids_of(found[1])) >= needs[other]:
                oldest = (*found, pool)
        if oldest is None:
            return False
        _, slab, pool = oldest
        pool.revoke(slab)
        self._pools[group].grant(slab)
        self.num_moved_slabs[group] += 1
        return True

    def take_pending(self) -> Pending:
        num = len(self._pools)
        return [(block * num + group, key) for group, p in enumerate(self._pools) for block, key in p.take_pending()]

    def mark_written(self, blocks: Pending) -> None:
        for number, key in blocks:
            block, group = divmod(number, len(self._pools))
            self._pools[group].mark_written([(block, key)])

    @property
    def num_free_bytes(self) -> int:
        in_pools = zip(self._pools, self._shape.block_bytes, strict=True)
        num_used_bytes = sum(pool.num_used * size for pool, size in in_pools)
        return self._shape.num_bytes - self._shape.slab_bytes - num_used_bytes

    def sample(self, count: int) -> bytes:
        pool_by_slab = {slab: pool for pool in self._pools for slab in pool.slabs}
        first, end = self._shape.slab_bytes, self._shape.num_bytes
        states = bytearray()
        for place in range(first, end, -(-(end - first) // count)):
            pool = pool_by_slab.get(place // self._shape.slab_bytes)
            states.append(0 if pool is None else pool.state_at(place))
        return bytes(states)

    def reset(self) -> None:
        """Give back all slabs but the floors."""
        for pool in self._pools:
            while (found := pool.oldest_idle()) is not None:
                pool.revoke(found[1])
                self._unowned.append(found[1])
        self._fill_floors()

    def check_invariants(self) -> None:
        """Raise AssertionError unless each slab has one owner, no floor is undercut and no byte is used twice."""
        owned = [slab for pool in self._pools for slab in pool.slabs]
        assert sorted([*owned, *self._unowned]) == list(range(1, self._shape.num_slabs))
        assert all(pool.num_slabs >= floor for pool, floor in zip(self._pools, self._floors, strict=True))
        used = [
            (block * size, (block + 1) * size)
            for pool, size in zip(self._pools, self._shape.block_bytes, strict=True)
            for block in pool.used
        ]
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(used))), "two groups use the same byte"
