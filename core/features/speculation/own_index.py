"""OwnIndex: finds where the last tokens of a running request occurred before in its own prompt and answer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...scheduling.step.rows import Rows
from .ngrams import MAX_LENGTH, Hashes, hashes_at, match_length

MAX_SLOTS = 1 << 20  # largest size of a row's table: 4 MiB
MAX_NEW_TOKENS = 4096  # indexed in one step, so that a long prompt does not stall the streams


class Match(NamedTuple):
    """An earlier place with the same tokens before it."""

    source: str  # "own", "corpus", or "model": these are drafts of the draft model
    length: int  # number of equal tokens, as far as they were compared
    token_ids: list[int]  # the tokens that followed there
    chances: tuple[float, ...] = ()  # of each token, by the draft model


class OwnIndex:
    """A hash table of places for each row; its memory is used as rows fill. Places of a row's former request do no
    harm, since each place found is compared with the row's tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        num_slots = min(1 << (8 * max_model_len - 1).bit_length(), MAX_SLOTS)
        self._shift = np.uint64(64 - num_slots.bit_length() + 1)
        self._places = np.zeros((max_num_seqs, num_slots), np.int32)  # index of the token that followed
        self._num_indexed = np.zeros(max_num_seqs, np.int32)  # ends of windows below this are in the table
        self._epochs = np.full(max_num_seqs, -1, np.int32)

    def update(self, state: Rows, rows: npt.NDArray[np.intp]) -> Hashes:
        """Index the new tokens of `rows` since the last call, at most about MAX_NEW_TOKENS in all. Return the hashes of
        the tokens before the end of each row: [len(LENGTHS), n]."""
        is_new = self._epochs[rows] != state.epoch[rows]
        self._num_indexed[rows[is_new]], self._epochs[rows] = MAX_LENGTH, state.epoch[rows]
        starts, ends = self._num_indexed[rows], state.num_tokens[rows]
        counts = np.maximum(ends - starts, 0)
        if counts.sum() > MAX_NEW_TOKENS:
            counts = np.minimum(counts, max(MAX_NEW_TOKENS // len(rows), 1))
        self._num_indexed[rows] = starts + counts
        spread = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        owners = np.repeat(rows, counts)
        firsts = state.places(np.append(owners, rows), np.append(spread, np.maximum(ends, MAX_LENGTH)))
        hashes = hashes_at(state.flat_tokens, firsts)
        new = hashes[:, : len(owners)]
        self._places[owners, (new >> self._shift).astype(np.intp)] = spread
        return hashes[:, len(owners) :]

    def find(self, state: Rows, row: int, hashes: Hashes, most: int) -> Match | None:
        """Return the longest match of a row's last tokens at the places that its table names, with the `most` tokens
        that follow it; if these reach the row's end, they are repeated. None without a match of two tokens or more, and
        for a row of up to MAX_LENGTH tokens. hashes: [len(LENGTHS)] of the row."""
        end, tokens = int(state.num_tokens[row]), state.tokens[row]
        if end <= MAX_LENGTH:
            return None
        best = best_length = 0
        for place in self._places[row, (hashes >> self._shift).astype(np.intp)].tolist():
            if 0 < place < end and place != best:
                length = match_length(tokens, end, tokens, place)
                if length > best_length:
                    best, best_length = place, length
        if best_length < 2:
            return None
        period = end - best
        following = tokens[best : min(best + most, end)].tolist()
        while len(following) < most:
            following.append(following[-period])
        return Match("own", best_length, following)
