"""KVSizes: how many blocks of each KV group requests hold, and how many slabs the longest of them needs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ...ipc.kv.pool_shape import PoolShape
from ...ipc.spec.kv.kv_groups import KVGroup, num_held

SPACING = 2048  # tokens between kept boundaries of a prompt if no group sees all tokens


class KVSizes(NamedTuple):
    """Sizes of groups, blocks and requests."""

    groups: Sequence[KVGroup]
    shape: PoolShape
    block_size: int  # tokens
    step_tokens: int  # as of KVGroup.num_held
    max_model_len: int

    @property
    def has_windows(self) -> bool:
        return any(group.window is not None for group in self.groups)

    @property
    def are_full(self) -> bool:
        """Whether rows need all their blocks in each group."""
        return all(group.is_full for group in self.groups)

    @property
    def state_group(self) -> int | None:
        """The number of the group of layers with a state, if there is one."""
        return next((number for number, group in enumerate(self.groups) if group.is_state), None)

    @property
    def is_of_step(self) -> bool:
        """Whether requests hold no blocks, see KVGroup."""
        return self.groups[0].is_of_step

    def held(self, num_tokens: int) -> list[int]:
        """Return the most blocks of each group that a request of `num_tokens` holds at a time."""
        return num_held(self.groups, num_tokens, self.step_tokens, self.block_size)

    def reserve(self, num_rows: int) -> list[int]:
        """Return how many blocks of each group are left to so many running rows for the next step: one for each, and of
        states one for each that reaches the end of a block, if all of them are computed evenly. A row without one
        leaves no snapshot."""
        counts = [0 if group.is_of_step else num_rows for group in self.groups]
        if self.groups[-1].is_state:
            counts[-1] = -(-num_rows // self.block_size)
        return counts

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of group 0 have the size of all blocks of such a request."""
        num_slabs = self.shape.num_slabs_for(self.held(num_tokens)) - 1
        return num_slabs * self.shape.slab_bytes // self.shape.block_bytes[0]

    @property
    def floors(self) -> list[int]:
        """By group, how many slabs the longest request holds that the memory has room for."""
        counts = range(1, -(-self.max_model_len // self.block_size) + 1)
        longest = bisect_right(
            counts, self.shape.num_slabs, key=lambda count: self.shape.num_slabs_for(self.held(count * self.block_size))
        )
        sizes = map(self.shape.num_whole, self.shape.block_bytes)
        return [-(-count // size) for count, size in zip(self.held(longest * self.block_size), sizes, strict=True)]

    @property
    def spacing(self) -> int:
        """The number of blocks between kept boundaries of a prompt: so many that the blocks that groups with windows
        or states need at one of them take at most a third of the cache."""
        full_bytes = needed_bytes = 0
        for group, size in zip(self.groups, self.shape.block_bytes, strict=True):
            most_needed = group.most_needed(self.block_size)
            if most_needed is None:
                full_bytes += size
            else:
                needed_bytes += most_needed * size
        return max(-(-2 * needed_bytes // full_bytes) if full_bytes else SPACING // self.block_size, 1)
