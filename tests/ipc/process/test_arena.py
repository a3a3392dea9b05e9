"""Slots of the groups that own slabs have their own bytes, and the same numbers on all hosts."""

from __future__ import annotations

import os
import random
from contextlib import closing
from itertools import pairwise

import pytest

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.process.arena import PAGE, Arena, ArenaShape, new_arena
from tokenloom.tests.support.today import seeds


def random_shape(rng: random.Random) -> ArenaShape:
    """A shape of one to three groups, of at most 8 slabs."""
    sizes = [rng.choice([64, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 8]) for _ in range(rng.randrange(1, 4))]
    slab_bytes = ArenaShape.of(sizes, 1 << 30).slab_bytes
    return ArenaShape.of(sizes, rng.randrange(1, 9) * slab_bytes + rng.randrange(slab_bytes))


def numbers_of(shape: ArenaShape, slab: int, group: int) -> list[int]:
    """The numbers of a group's slots in a slab; slabs from 1."""
    count = shape.slots_of_slab[group]
    return [slot * len(shape.slot_bytes) + group for slot in range(slab * count, (slab + 1) * count)]


@pytest.mark.parametrize("seed", seeds(8, 200))
def test_slots_of_any_owners_of_slabs_have_their_own_bytes(seed: int) -> None:
    rng, fd = random.Random(seed), new_arena()
    shape = random_shape(rng)
    owners = [rng.randrange(shape.num_groups) for _ in range(shape.num_slabs)]
    numbers = [number for i, group in enumerate(owners) for number in numbers_of(shape, i + 1, group)]
    with closing(Arena.sized(fd, shape)) as arena:
        for number in numbers:
            with arena.slot(number) as slot:
                assert len(slot) == shape.slot_bytes[number % shape.num_groups] == shape.bytes_of(number)
                slot[:] = bytes([number % 251]) * len(slot)
        content = bytes(arena.memory)
    os.close(fd)
    assert len(content) == shape.num_slabs * shape.slab_bytes
    spans = []
    for number in numbers:
        slab, index = shape.place_of(number)
        group = shape.group_of(number)
        start = slab * shape.slab_bytes + index * shape.stride(group)
        assert start % PAGE == 0, "O_DIRECT needs a page's begin"
        assert set(content[start : start + shape.bytes_of(number)]) == {number % 251}
        spans.append((start, start + shape.bytes_of(number)))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "two slots have the same byte"


@pytest.mark.parametrize("seed", seeds(8, 200))
def test_numbers_of_slots_alone_are_accepted(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    groups, slabs = range(shape.num_groups), range(1, shape.num_slabs + 1)
    valid = {number for slab in slabs for group in groups for number in numbers_of(shape, slab, group)}
    shape.check(list(valid))
    for number in range(-3, max(valid) + 3 * shape.num_groups):
        if number not in valid:
            with pytest.raises(ProtocolError, match="are not all in"):
                shape.check([min(valid), number, max(valid)])
    for group in groups:  # as a pool of blocks
        first, end = shape.slots_of_slab[group], shape.ids.num_blocks(group)
        assert {slot * shape.num_groups + group for slot in range(first, end)} <= valid
    assert len(valid) == sum(shape.ids.num_blocks(group) - shape.slots_of_slab[group] for group in groups)


def test_a_number_out_of_range_is_refused_with_its_group_if_there_are_several() -> None:
    shape = ArenaShape(7, (1,), (64,))
    with pytest.raises(ProtocolError, match=r"^slots 1 to 8 are not all in \[1, 7\]$"):
        shape.check([8, 1])
    with pytest.raises(ProtocolError, match=r"^slots 3 to 32 of KV group 1 are not all in \[4, 31\]$"):
        ArenaShape(7, (1, 4), (64, 16)).check([2, 2 * 32 + 1, 2 * 3 + 1])


def test_with_one_group_slots_follow_one_another_from_number_1() -> None:
    shape = ArenaShape.of([5000], 100_000)
    assert shape == ArenaShape(12, (1,), (5000,)) and shape.slab_bytes == shape.stride(0) == 8192
    assert [shape.place_of(number) for number in (1, 2, 12)] == [(0, 0), (1, 0), (11, 0)]


def test_a_slab_is_the_smallest_that_holds_whole_slots_or_32_of_each_smaller_one() -> None:
    shape = ArenaShape.of([10 * PAGE, PAGE, 10 * PAGE - 5, 3 * PAGE - 1], 1000 * PAGE)
    assert shape.slots_of_slab == (3, 30, 3, 10) and shape.slab_bytes == 30 * PAGE and shape.num_slabs == 33
    shape = ArenaShape.of([11 * PAGE, 7 * PAGE], 1000 * PAGE)
    assert shape.slots_of_slab == (7, 11) and shape.slab_bytes == 77 * PAGE and shape.num_slabs == 12
    shape = ArenaShape.of([101 * PAGE, 97 * PAGE], 40_000 * PAGE)
    assert shape.slots_of_slab == (31, 32) and shape.slab_bytes == 31 * 101 * PAGE and shape.num_slabs == 12


@pytest.mark.parametrize("seed", seeds(8, 200))
def test_hosts_with_different_ranks_have_the_same_numbers(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randrange(2, 6)
    shape = random_shape(rng)
    shape = ArenaShape.of([size * num_ranks for size in shape.slot_bytes], shape.num_bytes * num_ranks)
    for num_local in range(1, num_ranks + 1):
        part = shape.share(num_local, num_ranks)
        assert part.slot_bytes == tuple(size * num_local // num_ranks for size in shape.slot_bytes)
        assert part.ids == shape.ids and part.num_bytes <= shape.num_bytes
        for slab in range(1, shape.num_slabs + 1):
            for group, size in enumerate(part.slot_bytes):
                places = [part.place_of(number) for number in numbers_of(shape, slab, group)]
                assert places == [shape.place_of(number) for number in numbers_of(shape, slab, group)]
                assert places[-1][1] * part.stride(group) + size <= part.slab_bytes, "it ends in its slab"
