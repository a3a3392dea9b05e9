"""Computed: the longest prefix of a request with which all KV groups can continue, and where its blocks are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .block_pool import BlockPool
from .hit_rule import longest_hit


class Computed(NamedTuple):
    """The blocks that are needed where a request continues. A pool has each, or an outer place that is as near."""

    num_blocks: int  # the boundary at which it continues
    deepest: int  # the boundary at which the first group alone could
    blocks: Sequence[Sequence[int]]  # by group: those of the pool, in their order
    places: Sequence[Mapping[int, int]]  # by group: the outer places of the others, by their index in the prompt
    num_unusable: Sequence[int]  # by group: see Hit


def find_computed(
    num_readable: int,
    num_needed: Sequence[int | None],
    key: Callable[[int], bytes],
    pools: Sequence[BlockPool],
    find_outside: Callable[[bytes, int], int | None] | None,
) -> Computed:
    """Find the longest prefix of at most `num_readable` blocks. Each block is looked up once.

    num_needed: by group, how many blocks before a boundary are needed there; None: all of them. key: returns the key of
    a block of the prompt. find_outside: returns the outer place of a group's block with a key."""
    blocks = [dict[int, int]() for _ in pools]
    places = [dict[int, int]() for _ in pools]

    def has(group: int, i: int) -> bool:
        block = pools[group].lookup(key(i))
        if block is not None:
            blocks[group][i] = block
            return True
        if find_outside is None:
            return False
        place = find_outside(key(i), group)
        if place is not None:
            places[group][i] = place
        return place is not None

    hit = longest_hit(num_readable, num_needed, has)
    end = hit.num_blocks
    needed = [range(0 if count is None else max(end - count, 0), end) for count in num_needed]
    return Computed(
        end,
        hit.deepest,
        [[found[i] for i in each if i in found] for found, each in zip(blocks, needed, strict=True)],
        [{i: place for i, place in found.items() if i in each} for found, each in zip(places, needed, strict=True)],
        hit.num_unusable,
    )
