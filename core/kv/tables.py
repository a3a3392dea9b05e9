"""Tables: the blocks of a running request in each KV group.

Entry i of a table is the block of the tokens [i·size, (i+1)·size). All tables of a request have the same length. In a
group with a window, entries of blocks that no layer reads any more are the null block. See state_table.py for the group
of layers that keep a state. Knows no rows and no steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ...ipc.spec.kv.kv_groups import num_behind
from .block_pool import NULL_BLOCK, BlockPool


class FullTable:
    """Table in a group whose layers see all tokens."""

    has_appends = True

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.cache_block = pool.cache_block
        self.block_ids: list[int] = []
        self.num_left = 0

    @property
    def held(self) -> Sequence[int]:
        return self.block_ids

    def take(self, end: int, blocks: Sequence[int]) -> None:
        assert not self.block_ids and len(blocks) == end
        self.block_ids = list(blocks)

    def leave(self, first: int) -> None:
        pass

    def is_kept(self, i: int) -> bool:
        return True

    def free(self) -> None:
        self._pool.free(reversed(self.block_ids))


class WindowTable:
    """Table in a group whose layers see the last `window` tokens. Invariant: its first `num_left` entries are the null
    block, and no others are."""

    has_appends = True

    def __init__(self, pool: BlockPool, window: int, block_size: int, kept: Sequence[int]) -> None:
        """kept: boundaries, in ascending order, at which other requests are likely to begin: blocks that are needed
        there are reused last, others first."""
        self._pool = pool
        self.cache_block = pool.cache_block
        self._window = window
        self._block_size = block_size
        self._kept = kept
        self._num_needed = num_behind(window, block_size)
        self.block_ids: list[int] = []
        self.num_left = 0

    @property
    def held(self) -> Sequence[int]:
        return self.block_ids[self.num_left :]

    def take(self, end: int, blocks: Sequence[int]) -> None:
        assert not self.block_ids and len(blocks) <= end
        self.num_left = end - len(blocks)
        self.block_ids = [NULL_BLOCK] * self.num_left + list(blocks)

    def leave(self, first: int) -> None:
        end = max((first - self._window + 1) // self._block_size, self.num_left)
        left = self.block_ids[self.num_left : end]
        self._pool.free(left)
        self._pool.demote(block for i, block in enumerate(left, self.num_left) if not self.is_kept(i))
        self.block_ids[self.num_left : end] = [NULL_BLOCK] * len(left)
        self.num_left = end

    def is_kept(self, i: int) -> bool:
        following = bisect_right(self._kept, i)
        return following < len(self._kept) and i >= self._kept[following] - self._num_needed

    def free(self) -> None:
        self._pool.free(reversed(self.held))
