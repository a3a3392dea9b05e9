"""The hit rule: how many of a request's first blocks all KV groups can read from the cache.

A row goes on at boundary p, in blocks, if each group has the blocks that its layers still read there: all blocks before
p in a group without a window, the last few before p in a group with one. Knows no keys and no pools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Hit(NamedTuple):
    """The boundary at which all groups can go on, and the blocks that were found in vain."""

    num_blocks: int
    deepest: int  # the boundary at which the first group alone could go on
    num_unusable: list[int]  # by group: blocks before `deepest` that this group has made unusable; together all of them


def longest_hit(num_readable: int, num_needed: Sequence[int | None], has: Callable[[int, int], bool]) -> Hit:
    """Return the largest boundary of at most `num_readable` blocks at which every group has the blocks that it needs.

    num_needed: by group, how many blocks before a boundary are needed there; None: all of them. has: tells for a group
    and the index of a block whether the group has it; it is called at most once for each."""
    known = [num_readable] * len(num_needed)  # by group: the first of the blocks before the boundary that it surely has

    def settle(group: int, end: int) -> int:
        """Return the largest boundary up to `end` that suits the group."""
        count = num_needed[group]
        if count is None:
            if known[group]:
                known[group] = 0
                return next((i for i in range(end) if not has(group, i)), end)
            return end
        first = min(known[group], end)
        while first > (start := max(end - count, 0)):
            # All boundaries after the first missing block need it, up to the former one.
            end = next((i for i in range(start, first) if not has(group, i)), end)
            first = start
        known[group] = first
        return end

    end = deepest = settle(0, num_readable)
    num_unusable = [0] * len(num_needed)
    is_moved = len(num_needed) > 1
    while is_moved:
        begun_at = end
        for group in range(len(num_needed)):
            settled = settle(group, end)
            num_unusable[group] += end - settled
            end = settled
        is_moved = end < begun_at
    return Hit(end, deepest, num_unusable)
