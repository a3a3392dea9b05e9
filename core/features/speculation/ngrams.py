"""Hashes of the last tokens of a text, and the table that finds where the same tokens came before.

A table holds one place for each slot, the newest wins; so it loses old places, never grows, and every place that it
gives must be compared with the tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...request import Ids

LENGTHS = (8, 5, 3, 2)  # of matches that are looked for, the longest first
MAX_LENGTH = LENGTHS[0]
LONGEST = 32  # tokens of a match that are compared

Hashes = npt.NDArray[np.uint64]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BACK = np.arange(MAX_LENGTH)


def hashes_at(tokens: Ids, ends: npt.NDArray[np.integer]) -> Hashes:
    """Return hashes of the LENGTHS tokens before each of `ends`: [len(LENGTHS), n]. tokens: flat; ends ≥ MAX_LENGTH."""
    windows = tokens[ends[:, None] - 1 - _BACK].astype(np.uint64)  # the last token first
    found = np.empty((len(LENGTHS), len(ends)), np.uint64)
    value = np.zeros(len(ends), np.uint64)
    for length in range(1, MAX_LENGTH + 1):
        value = (value + windows[:, length - 1] + np.uint64(length)) * _FACTOR
        value ^= value >> np.uint64(29)
        if length in LENGTHS:
            found[LENGTHS.index(length)] = value
    return found


def match_length(text: Ids, end: int, other: Ids, other_end: int) -> int:
    """Return how many tokens before `end` of `text` equal those before `other_end` of `other`, at most LONGEST."""
    count = min(end, other_end, LONGEST)
    is_other = text[end - count : end] != other[other_end - count : other_end]
    return count if not is_other.any() else int(is_other[::-1].argmax())
