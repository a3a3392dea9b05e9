"""PoolShape: the division of the KV pool's memory into slabs and blocks.

    group 0  |      0      |      1      |      2      |      3      | …
    group 1  |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  8  |  9  …
    slabs    |             0             |             1             | …

Block k of a group whose blocks have b bytes is the bytes [k · b, (k + 1) · b) of one memory, for every group. A slab
belongs to one group at a time, which uses only blocks that lie wholly in its slabs, so that the blocks in use of two
groups never overlap. Slab 0 belongs to none: it has the null block of each. With one group a slab is a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import count

import msgspec

MIN_BLOCKS_OF_SLAB = 32  # of each group whose blocks the ends of slabs cut: 1 in 33 is lost at most


class PoolShape(msgspec.Struct, frozen=True):
    """Sizes of the pool on each rank; all ranks have the same."""

    num_slabs: int
    slab_bytes: int
    block_bytes: tuple[int, ...]  # of a block of each group

    @classmethod
    def of(cls, num_bytes: int, block_bytes: Sequence[int]) -> PoolShape:
        """Return the shape of a pool of at most `num_bytes`. A slab is the smallest multiple of the largest block that
        holds a whole number, or at least MIN_BLOCKS_OF_SLAB, of each smaller one: the smaller the slabs, the fewer
        bytes are idle in those that a group uses in part."""
        largest = max(block_bytes)
        slab_bytes = next(
            num_bytes_of_slab
            for num_bytes_of_slab in count(largest, largest)
            if all(
                num_bytes_of_slab % size == 0 or num_bytes_of_slab >= MIN_BLOCKS_OF_SLAB * size for size in block_bytes
            )
        )
        return cls(num_bytes // slab_bytes, slab_bytes, tuple(block_bytes))

    @property
    def num_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def num_usable(self) -> int:
        """The blocks of group 0 that all slabs but slab 0 have room for."""
        return (self.num_slabs - 1) * self.slab_bytes // self.block_bytes[0]

    def num_blocks(self, group: int = 0) -> int:
        """Return the number of a group's blocks in the whole pool, the null block and those that cross the ends of
        slabs included."""
        return self.num_bytes // self.block_bytes[group]

    @property
    def all_blocks(self) -> list[int]:
        """The numbers of blocks of the groups in the whole pool."""
        return [self.num_blocks(group) for group in range(len(self.block_bytes))]

    def num_slabs_for(self, num_blocks: Iterable[int]) -> int:
        """Return how many slabs have room for these numbers of blocks of the groups, slab 0 included."""
        counts = zip(num_blocks, self.block_bytes, strict=True)
        return 1 + sum(-(-count // self.num_whole(size)) for count, size in counts)

    def num_fitting(self, num_blocks: Sequence[int], most: int) -> int:
        """Return how many requests that hold these numbers of blocks of the groups fit, at most `most`."""
        counts = range(1, most + 1)
        return bisect_right(counts, self.num_slabs, key=lambda n: self.num_slabs_for(n * each for each in num_blocks))

    def num_whole(self, block_bytes: int) -> int:
        """Return how many blocks of this size lie wholly in any slab."""
        return self.slab_bytes // block_bytes - (self.slab_bytes % block_bytes > 0)
