"""Hashes of the last tokens of a text, by which hash tables find where the same tokens occurred before.

Such a table (OwnIndex, Corpus) keeps one place per slot, the newest. So it never grows, older places are lost, and each
place found must be compared with the tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...request import Ids

LENGTHS = (8, 5, 3, 2)  # numbers of tokens that are hashed together, the largest first
MAX_LENGTH = LENGTHS[0]
LONGEST = 32  # most tokens of a match that are compared

Hashes = npt.NDArray[np.uint64]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BACK = np.arange(MAX_LENGTH)


def hashes_at(tokens: Ids, ends: npt.NDArray[np.integer]) -> Hashes:
    """Return, for each of LENGTHS, the hashes of as many tokens before each of `ends`: [len(LENGTHS), n]. tokens: flat;
    ends: [n], each ≥ MAX_LENGTH."""
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
