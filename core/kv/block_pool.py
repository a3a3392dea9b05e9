"""The pool of KV blocks: ids, reference counts, one LRU list of free blocks, one index from content key to block.

Owns no tokens and no requests. A free block keeps its key, and so can be found again, until it is taken for new
content. Block 0 is the null block: never handed out, safe to point at.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from .block_record import BlockRecord

NULL_BLOCK = 0


class BlockPool:
    """Invariants (check_invariants): free + referenced + null partition the ids; nothing referenced is free; an
    indexed block carries exactly its key."""

    def __init__(self, num_blocks: int, record: BlockRecord | None = None) -> None:
        """`record` keeps the index for a core that comes after this one; what it holds is found from the start."""
        assert num_blocks >= 2, "the null block and one more"
        self.num_blocks = num_blocks
        self._ref_count = [0] * num_blocks
        self._key_by_block: list[bytes | None] = [None] * num_blocks
        self._block_by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # the first is taken first
        self._pending: list[tuple[int, bytes]] = []  # published since the last `take_pending`
        self._record = record
        if record is not None:
            self._adopt(record.key_by_block)

    def _adopt(self, key_by_block: dict[int, bytes]) -> None:
        for block, key in key_by_block.items():
            self._key_by_block[block] = key
            self._block_by_key[key] = block
            self._free.move_to_end(block)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks, the longest unused first; their old keys leave the index. None: fewer are free."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if self._key_by_block[block] is not None:
                self._drop_key(block)
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Reference blocks that the index found; free ones leave the free list."""
        for block in blocks:
            if self._ref_count[block] == 0:
                del self._free[block]
            self._ref_count[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block, in this order: what comes first is reused first. Blocks without a key
        can serve nobody and are reused before all others."""
        for block in blocks:
            count = self._ref_count[block] - 1
            assert count >= 0, f"block {block} is freed more often than referenced"
            self._ref_count[block] = count
            if count == 0:
                self._free[block] = None
                if self._key_by_block[block] is None:
                    self._free.move_to_end(block, last=False)

    def cache_block(self, block: int, key: bytes) -> None:
        """Let `key` find `block`, unless another block with the same content is found already."""
        if key not in self._block_by_key:
            self._key_by_block[block] = key
            self._block_by_key[key] = block
            if self._record is not None:
                self._pending.append((block, key))

    def take_pending(self) -> list[tuple[int, bytes]]:
        """Blocks and keys that were published since the last call, for `confirm` when all steps sent so far and the
        next one are done."""
        unconfirmed, self._pending = self._pending, []
        return unconfirmed

    def mark_written(self, published: Iterable[tuple[int, bytes]]) -> None:
        """The workers have written these; what has got another key since is not recorded."""
        for block, key in published:
            if self._record is not None and self._key_by_block[block] == key:
                self._record.write(block, key)

    def lookup(self, key: bytes) -> int | None:
        return self._block_by_key.get(key)

    def is_referenced(self, block: int) -> bool:
        return self._ref_count[block] > 0

    def is_exclusive(self, block: int) -> bool:
        """Whether exactly one request references the block."""
        return self._ref_count[block] == 1

    def sample(self, count: int) -> bytes:
        """The states of at most `count` blocks, evenly spread: 0 empty, 1 free with content that can be found, 2 used
        by one request, 3 by several."""
        stride = -(-(self.num_blocks - 1) // count)
        return bytes(
            min(1 + self._ref_count[block], 3) if self._ref_count[block] else self._key_by_block[block] is not None
            for block in range(1, self.num_blocks, stride)
        )

    def drop_idle_keys(self) -> None:
        """Forget the content of free blocks."""
        for block in self._free:
            if self._key_by_block[block] is not None:
                self._drop_key(block)

    def clear_index(self) -> None:
        """Forget all content: what the blocks hold is not to be trusted or not of these weights."""
        self._block_by_key.clear()
        self._key_by_block = [None] * self.num_blocks
        self._pending = []
        if self._record is not None:
            self._record.clear()

    def _drop_key(self, block: int) -> None:
        key = self._key_by_block[block]
        assert key is not None, f"block {block} has no key"
        del self._block_by_key[key]
        self._key_by_block[block] = None
        if self._record is not None:
            self._record.erase(block)

    def check_invariants(self, tables: Iterable[Iterable[int]]) -> None:
        """AssertionError unless the pool is consistent with the block tables of all running requests."""
        expected = Counter(block for table in tables for block in table)
        assert NULL_BLOCK not in expected, "a request holds the null block"
        for block in range(1, self.num_blocks):
            assert self._ref_count[block] == expected[block], f"block {block}: wrong reference count"
        assert set(self._free) == {block for block in range(1, self.num_blocks) if not expected[block]}
        for key, block in self._block_by_key.items():
            assert self._key_by_block[block] == key, f"block {block} does not carry the key that finds it"
        assert sum(key is not None for key in self._key_by_block) == len(self._block_by_key)
