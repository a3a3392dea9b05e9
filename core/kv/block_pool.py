"""BlockPool: ids and reference counts of KV blocks, an LRU list of free ones, and an index from content key to block.

A free block keeps its key, and lookups find it, until it is allocated for new content or its key is removed. Empty
blocks, which have no key, are reused first, then demoted ones, then the least recently used. Block 0 is the null block:
it is never allocated, and workers may name it where no block is needed. Observers follow which content the blocks hold.
Knows no tokens and no requests.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from .kept_last import KeptLast
from .reuse_order import OldestFirst, SpareBlocks, UsefulBlocks

NULL_BLOCK = 0


class LossObserver(Protocol):
    """Interface of an object that follows which content leaves a pool."""

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        """Record that the block leaves the index because the next step may overwrite it. is_demoted: it is unlikely to
        be of use."""
        ...

    def forgotten(self, group: int, block: int, key: bytes) -> None:
        """Record that the block leaves the index although its content stays: no request may find it any more."""
        ...

    def cleared(self, group: int) -> None:
        """Record that the content of all blocks of the group is void."""
        ...


class BlockObserver(LossObserver, Protocol):
    """Interface of a follower of a pool's cached content: a record of it, or an outer tier that copies it."""

    def written(self, group: int, block: int, key: bytes) -> None:
        """Record that the workers have written the block, so that its content can be read."""
        ...


class BlockPool:
    """Pool of the blocks of one KV group.

    Invariants (check_invariants): the ids are partitioned into free blocks, referenced blocks and the null block; free
    blocks are empty, demoted or others with content; an indexed block carries exactly the key that finds it."""

    def __init__(
        self,
        num_blocks: int,
        observers: Sequence[BlockObserver] = (),
        key_by_block: Mapping[int, bytes] | None = None,
        group: int = 0,
    ) -> None:
        """key_by_block: keys of blocks that already have content. group: the KV group of these blocks."""
        assert num_blocks >= 2, "the null block and one more"
        self.num_blocks = num_blocks
        self._ref_count = [0] * num_blocks
        self._key_by_block: list[bytes | None] = [None] * num_blocks
        self._block_by_key: dict[bytes, int] = {}
        self._empty: SpareBlocks  # reused first
        self._demoted: SpareBlocks  # reused next
        self._free: UsefulBlocks = self._new_useful()  # others, with `now` when they were freed
        self.now = 1  # stamp of last use for blocks that are freed
        self.pending: list[tuple[int, bytes]] = []  # cached since the last `take_pending`
        # By kind: keys of blocks that were reused lately, and whether a request ended with them; see `_come_back`.
        self._gone: tuple[OrderedDict[bytes, bool], ...] = ()
        self._observers = observers
        self._loss_observers: Sequence[LossObserver] = observers
        self.group = group
        for block, key in (key_by_block or {}).items():
            self._restore(block, key)
        self._empty, self._demoted = self._new_spares()

    def _new_spares(self) -> tuple[SpareBlocks, SpareBlocks]:
        """Return the empty blocks that the pool has at first, and no demoted ones."""
        keys = self._key_by_block
        return [block for block in range(self.num_blocks - 1, NULL_BLOCK, -1) if keys[block] is None], OldestFirst()

    def _new_useful(self) -> UsefulBlocks:
        """Return a collection of free blocks with content; it has none at first."""
        return OrderedDict[int, int]()

    def _restore(self, block: int, key: bytes) -> None:
        """Add the content that a free block has already."""
        self._free[block] = 0
        self._key_by_block[block] = key
        self._block_by_key[key] = block

    def add_observer(self, observer: BlockObserver) -> None:
        self._observers = [*self._observers, observer]
        self.add_loss_observer(observer)

    def add_loss_observer(self, observer: LossObserver) -> None:
        self._loss_observers = [*self._loss_observers, observer]

    @property
    def keys(self) -> list[bytes]:
        """The keys of the blocks that lookups find."""
        return list(self._block_by_key)

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._demoted) + len(self._free)

    @property
    def num_used(self) -> int:
        """The number of blocks that are referenced."""
        return self.num_blocks - 1 - self.num_free

    @property
    def num_cached(self) -> int:
        """The number of blocks that lookups find."""
        return len(self._block_by_key)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` free blocks, least recently used first, and return them; their keys leave the index. None if
        fewer are free."""
        if count > len(self._empty) and count > self.num_free:  # the first is true rarely, and saves a call
            return None
        blocks = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        """Remove the content of the free block that is reused next, and return the block."""
        is_demoted = self._reuses_demoted()
        block = self._demoted.pop() if is_demoted else self._free.popitem(last=False)[0]
        self._report_evicted(block, is_demoted=is_demoted)
        return block

    def _reuses_demoted(self) -> bool:
        """Return whether a demoted block is reused next, if none is empty."""
        return len(self._demoted) > 0

    def _report_evicted(self, block: int, *, is_demoted: bool) -> None:
        """Remove the key of a block from the index, since it is going to be overwritten."""
        key = self._key_by_block[block]
        assert key is not None, "a block without content is empty"
        self._remove(block, key)
        for observer in self._loss_observers:
            observer.evicted(self.group, block, key, is_demoted=is_demoted)

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of the blocks, which `lookup` has found; free ones leave the free list."""
        for block in blocks:
            if self._ref_count[block] == 0 and self._free.pop(block, None) is None:
                self._demoted.remove(block)
            self._ref_count[block] += 1

    def note_needed(self, blocks: Iterable[int]) -> None:
        """Note that a new request needs these blocks, before it touches them. Here that is no matter."""

    def note_end(self, blocks: Sequence[int], num_found: int) -> None:
        """Note that a request ends with these blocks, before it frees them. num_found: how many of them earlier
        requests have left to it."""

    def free(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block. Of free blocks with content, those freed first are reused first; empty
        ones are reused before them."""
        for block in blocks:
            count = self._ref_count[block] - 1
            assert count >= 0, f"block {block} is freed more often than referenced"
            self._ref_count[block] = count
            if count == 0:
                if self._key_by_block[block] is None:
                    self._empty.append(block)
                else:
                    self._free[block] = self.now

    def demote(self, blocks: Iterable[int]) -> None:
        """Let those of these blocks that are free and have content be reused before all others with content."""
        for block in blocks:
            if self._free.pop(block, None) is not None:
                self._demoted.append(block)

    def keep(self, block: int) -> None:
        """Let a cached block, whenever it is free, be reused after all others, until `release_kept`."""
        if not isinstance(self._free, KeptLast):
            self._free = KeptLast(self._free)
        self._free.keep(block)

    def release_kept(self, block: int) -> None:
        if isinstance(self._free, KeptLast):
            self._free.release(block)

    @property
    def has_empty(self) -> bool:
        """Whether a free block has no content."""
        return len(self._empty) > 0

    @property
    def oldest_stamp(self) -> int:
        """The stamp of last use of the free block with content that was used longest ago: 0 if one is demoted. There
        must be one."""
        return 0 if self._demoted else next(iter(self._free.values()))

    @property
    def last_uses(self) -> Iterator[tuple[int, int]]:
        """(Stamp of last use, block) of the free blocks with content, in order of time; demoted ones come first
        and have 0."""
        yield from ((0, block) for block in self._demoted)
        yield from ((stamp, block) for block, stamp in self._free.items())

    def cache_block(self, block: int, key: bytes, *, is_private: bool = False) -> None:
        """Add `key` to the index, unless the index has another block with the same content. is_private: do not report
        to observers when the block is written, because only the answers of one request use this key."""
        if key not in self._block_by_key:
            self._key_by_block[block] = key
            self._block_by_key[key] = block
            for gone in self._gone:
                if key in gone:
                    self._come_back(block, key)
            if self._observers and not is_private:
                self.pending.append((block, key))

    def _come_back(self, block: int, key: bytes) -> None:
        """Learn from a block that was reused before a request needed it again. Only of pools that remember them."""

    def cache_written(self, block: int, key: bytes) -> None:
        """Add `key` to the index for a block that already has its content."""
        self.cache_block(block, key, is_private=True)
        self.mark_written([(block, key)])

    def take_pending(self) -> list[tuple[int, bytes]]:
        """Return the blocks and keys cached since the last call, without private ones; none if nobody observes the
        pool. The next step writes them; once it is done, the caller must pass them to `mark_written`."""
        pending, self.pending = self.pending, []
        return pending

    def mark_written(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Report to the observers that the workers have written these blocks; skip any block whose key has changed
        since."""
        for block, key in blocks:
            if self.holds(block, key):
                for observer in self._observers:
                    observer.written(self.group, block, key)

    def lookup(self, key: bytes) -> int | None:
        """Return the block with this content, without adding a reference; None if there is none."""
        return self._block_by_key.get(key)

    def block_of(self, key: bytes) -> int:
        """Return the block with this content, which `lookup` has found."""
        return self._block_by_key[key]

    def key_of(self, block: int) -> bytes | None:
        """Return the key by which lookups find the block; None if they do not."""
        return self._key_by_block[block]

    def holds(self, block: int, key: bytes) -> bool:
        """Return whether the block has this content."""
        return self._key_by_block[block] == key

    def ref_count(self, block: int) -> int:
        """Return the number of references to the block."""
        return self._ref_count[block]

    def sample(self, count: int) -> bytes:
        """Return the states of at most `count` blocks, evenly spread, a byte each: 0 empty, 1 free and cached, 2 with
        one reference, 3 with several."""
        stride = -(-(self.num_blocks - 1) // count)
        return bytes(map(self._state, range(1, self.num_blocks, stride)))

    def _state(self, block: int) -> int:
        count = self._ref_count[block]
        return min(1 + count, 3) if count else self._key_by_block[block] is not None

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove the keys of these blocks from the index. Free ones among them are reused before all others."""
        for block in blocks:
            if (key := self._key_by_block[block]) is not None:
                self._remove(block, key)
                for observer in self._loss_observers:
                    observer.forgotten(self.group, block, key)
                if self._ref_count[block] == 0:
                    if self._free.pop(block, None) is None:
                        self._demoted.remove(block)
                    self._empty.append(block)

    def forget_all(self) -> None:
        """Remove all keys from the index. Blocks keep their content for the requests that reference them."""
        self.forget(list(self._block_by_key.values()))

    def clear_index(self) -> None:
        """Remove all keys from the index, because the blocks were lost or hold values of other weights."""
        self._block_by_key.clear()
        self._key_by_block = [None] * self.num_blocks
        for block in [*self._demoted]:
            self._demoted.remove(block)
            self._empty.append(block)
        for block in reversed([*self._free]):
            self._free.pop(block, None)
            self._empty.append(block)
        self.pending = []
        for observer in self._loss_observers:
            observer.cleared(self.group)

    def _remove(self, block: int, key: bytes) -> None:
        del self._block_by_key[key]
        self._key_by_block[block] = None

    def _ids(self) -> Iterable[int]:
        """The ids that requests may get, free and referenced ones."""
        return range(1, self.num_blocks)

    def check_invariants(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the pool is consistent with the block tables of all running requests."""
        expected = Counter(block for table in tables for block in table)
        assert NULL_BLOCK not in expected, "a request holds the null block"
        for block in range(1, self.num_blocks):
            assert self._ref_count[block] == expected[block], f"block {block}: wrong reference count"
        idle = {block for block in self._ids() if not expected[block]}
        assert {*self._empty, *self._demoted, *self._free} == idle and len(idle) == self.num_free
        assert all(self._key_by_block[block] is None for block in self._empty), "a block with content counts as empty"
        assert all(self._key_by_block[block] is not None for block in (*self._demoted, *self._free))
        for key, block in self._block_by_key.items():
            assert self._key_by_block[block] == key, f"block {block} does not carry the key that finds it"
        assert sum(key is not None for key in self._key_by_block) == len(self._block_by_key)
