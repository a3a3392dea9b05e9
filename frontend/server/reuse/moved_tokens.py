"""Which tokens of an earlier prompt stand in a later one behind the first difference, so that no cache finds them.

Tokens are encoded: 4 bytes each.
"""

from __future__ import annotations

from typing import NamedTuple

LEAST = 16  # tokens of a part that counts as moved: fewer occur by chance
MAX_PARTS = 32
SPAN = 8192  # tokens behind a difference in which the next equal part is looked for
_STEPS = [*range(LEAST), *range(LEAST, 2048, 16)]  # tokens behind a difference at which a part of the earlier may begin


class Moved(NamedTuple):
    """The tokens behind the first difference that were computed before. is_cut: there the later prompt goes on without
    a part that the earlier one has, and adds none."""

    num_tokens: int
    is_cut: bool


def num_common(one: bytes, other: bytes) -> int:
    """Return how many first tokens are equal."""
    end = min(len(one), len(other))
    if one[:end] == other[:end]:
        return end // 4
    start = 0
    while end - start > 1:
        middle = (start + end) // 2
        if one[start:middle] == other[start:middle]:
            start = middle
        else:
            end = middle
    return start // 4


def moved_tokens(earlier: bytes, later: bytes, first: int) -> Moved:
    """Count the tokens behind the first difference, at token `first`, that both have, in parts of at least LEAST;
    those of twice as many are found for certain, if they are not too far away."""
    num_moved = 0
    at = at_later = first
    is_cut = False
    for _ in range(MAX_PARTS):
        found = _next_part(earlier, later, at, at_later)
        if found is None:
            break
        begin, begin_later = found
        if not num_moved:
            is_cut = begin_later == first < begin
        length = num_common(earlier[4 * begin :], later[4 * begin_later :])
        num_moved += length
        at, at_later = begin + length, begin_later + length
    return Moved(num_moved, is_cut)


def _next_part(earlier: bytes, later: bytes, at: int, at_later: int) -> tuple[int, int] | None:
    """Return where the next equal part begins in both, from these tokens on; None if there is none."""
    for step in _STEPS:
        start = 4 * (at + step)
        part = earlier[start : start + 4 * LEAST]
        if len(part) < 4 * LEAST:
            return None
        place, end = later.find(part, 4 * at_later, 4 * (at_later + SPAN)), 4 * (at_later + SPAN)
        while place >= 0 and place % 4:
            place = later.find(part, place + 1, end)
        if place >= 0:
            begin, begin_later = start // 4, place // 4
            while begin > at and begin_later > at_later and _same(earlier, begin - 1, later, begin_later - 1):
                begin, begin_later = begin - 1, begin_later - 1
            return begin, begin_later
    return None


def _same(one: bytes, i: int, other: bytes, j: int) -> bool:
    return one[4 * i : 4 * i + 4] == other[4 * j : 4 * j + 4]
