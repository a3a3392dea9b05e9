"""Blocks of several KV groups move between one pool and one arena as their bytes would, in the order of the steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.process.arena import PAGE, Arena, ArenaShape, new_arena
from tokenloom.tests.workers.features.kv_copies.test_kv_copies import begun_with, copies_of
from tokenloom.workers.features.kv_copies.kv_copies import KVCopies
from tokenloom.workers.machine.parallel import NullGroup
from tokenloom.workers.step.kv_cache import KVCacheSpec, KVPool

SPECS = [KVCacheSpec(3, 4, 16, 8, torch.float32), KVCacheSpec(1, 2, 8, 8, torch.bfloat16)]
SIZES = [spec.block_bytes for spec in SPECS]  # 12288 and 512
NUM_SLABS = 5


class Rank:
    """A rank with its pool, and its part of a host's arena."""

    def __init__(self, arena: Arena, rank: int, local_ranks: Sequence[int]) -> None:
        shape = PoolShape(6, 4 * SIZES[0], tuple(SIZES))
        self.pool, self.part = KVPool(SPECS, shape, torch.device("cpu")), local_ranks.index(rank)
        self.bytes = self.pool.buffer.numpy()
        self.bytes[:] = np.random.default_rng(rank).integers(0, 256, len(self.bytes))
        self.copies = KVCopies(arena, self.pool.blocks, NullGroup(rank, 8), local_ranks)

    def block(self, memory: np.ndarray, group: int, block: int) -> np.ndarray:
        return memory[block * SIZES[group] : (block + 1) * SIZES[group]]

    def slot(self, memory: np.ndarray, shape: ArenaShape, number: int) -> np.ndarray:
        """This rank's part of a slot, found by the definition of numbers and slabs."""
        slot, group = divmod(number, 2)
        slab, index = divmod(slot, shape.slots_of_slab[group])
        stride = -(-shape.slot_bytes[group] // PAGE) * PAGE
        start = (slab - 1) * shape.slab_bytes + index * stride + self.part * SIZES[group]
        return memory[start : start + SIZES[group]]


def arena_for(num_local: int, num_ranks: int) -> Arena:
    """The arena of a host with some of all ranks. A slab has several slots of each group."""
    whole = ArenaShape.of([num_ranks * size for size in SIZES], 1 << 30)
    slots_of_slab = tuple(6 * count for count in whole.slots_of_slab)
    shape = ArenaShape(NUM_SLABS, slots_of_slab, whole.slot_bytes).share(num_local, num_ranks)
    return Arena.sized(new_arena(), shape)


def number_of(shape: ArenaShape, group: int, slab: int, index: int) -> int:
    return (slab * shape.slots_of_slab[group] + index) * 2 + group


@pytest.mark.parametrize(("local_ranks", "num_ranks"), [([0], 1), ([0, 1], 2), ([1, 2], 3), ([0], 3), ([3, 4, 5], 6)])
def test_random_copies_of_two_groups_equal_those_of_bytes(local_ranks: list[int], num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    arena = arena_for(len(local_ranks), num_ranks)
    shape, ranks = arena.shape, [Rank(arena, rank, local_ranks) for rank in local_ranks]
    expected_arena = np.frombuffer(arena.memory, np.uint8).copy()
    expected = [rank.bytes.copy() for rank in ranks]

    def draw(owners: list[int]) -> tuple[int, int]:
        """Draw a block, and a slot of its group in a slab of the arena that belongs to the group."""
        slab = int(rng.integers(NUM_SLABS))
        group = owners[slab]
        block = int(rng.integers(1, len(ranks[0].pool.caches[group])))
        return block, number_of(shape, group, slab + 1, int(rng.integers(shape.slots_of_slab[group])))

    for _ in range(60):
        owners = rng.integers(2, size=NUM_SLABS).tolist()
        stores = [draw(owners) for _ in range(rng.integers(5))]
        loads = [draw(owners)[::-1] for _ in range(rng.integers(5))]
        for rank, memory in zip(ranks, expected, strict=True):
            for block, number in stores:
                rank.slot(expected_arena, shape, number)[:] = rank.block(memory, number % 2, block)
        for rank, memory in zip(ranks, expected, strict=True):
            for number, block in loads:
                rank.block(memory, number % 2, block)[:] = rank.slot(expected_arena, shape, number)
        step = copies_of([id for pair in stores for id in pair], [id for pair in loads for id in pair])
        for rank in ranks:
            begun_with(rank.copies, step)
        for rank, memory in zip(ranks, expected, strict=True):
            np.testing.assert_array_equal(rank.bytes, memory)
        np.testing.assert_array_equal(np.frombuffer(arena.memory, np.uint8), expected_arena)
    assert expected_arena.any()


def test_blocks_of_a_slab_that_another_group_gets_are_stored_before_its_loads_overwrite_them() -> None:
    arena = arena_for(1, 1)
    shape, rank = arena.shape, Rank(arena, 0, [0])
    blocks = [4, 4 * 24]  # by group: the first of the pool's slab 1
    numbers = [number_of(shape, 0, 1, 0), number_of(shape, 1, 2, 3)]
    for group, other in ((1, 0), (0, 1)):
        arena.slot(numbers[other])[:] = content = bytes([7 + group]) * SIZES[other]
        before = bytes(rank.block(rank.bytes, group, blocks[group]))
        begun_with(rank.copies, copies_of([blocks[group], numbers[group]], [numbers[other], blocks[other]]))
        assert bytes(arena.slot(numbers[group])) == before
        assert bytes(rank.block(rank.bytes, other, blocks[other])) == content


FIRST = [2 * 6, 2 * 36 + 1]  # numbers of the first slots of the groups, if a slab has 6 of the one or 36 of the other


@pytest.mark.parametrize(
    ("stores", "loads", "words"),
    [
        ([24, FIRST[0]], [], r"blocks 4 to 24 are not all in \[1, 23\]"),  # group 1 has a block 24
        ([24, FIRST[0] - 2], [], r"slots 5 to 6 of KV group 0 are not all in \[6, 35\]"),
        ([], [FIRST[1] - 2, 1], r"slots 35 to 35 of KV group 1 are not all in \[36, 215\]"),
        ([], [FIRST[1], 24 * 24], r"blocks 576 to 576 are not all in \[1, 575\]"),
    ],
)
def test_an_id_that_the_group_of_its_slot_does_not_have_copies_nothing(
    stores: list[int], loads: list[int], words: str
) -> None:
    arena = arena_for(2, 2)
    rank = Rank(arena, 0, [0, 1])
    assert arena.shape.slots_of_slab == (6, 36)
    before = rank.bytes.copy()
    with pytest.raises(ProtocolError, match=words):
        begun_with(rank.copies, copies_of([4, FIRST[0], *stores], loads))
    assert (rank.bytes == before).all() and not np.frombuffer(arena.memory, np.uint8).any()


def test_an_arena_for_blocks_of_other_groups_is_refused() -> None:
    arena = arena_for(2, 2)
    with pytest.raises(ProtocolError, match="1 blocks of 12288 or 512 bytes are no slot of 24576 or 1024"):
        Rank(arena, 0, [0])
