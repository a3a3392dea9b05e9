"""Corpus: tokens of finished answers, in which later requests of the same owner find matches.

An owner is a cache salt with an adapter. Requests of different owners never find each other's tokens, since each token
is stored with its owner, and tokens of other owners do not match.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ...request import Ids
from .ngrams import LONGEST, MAX_LENGTH, Hashes, hashes_at, match_length
from .own_index import Match

_END = -1  # after each answer
_OWNER_FACTOR = np.uint64(0xD1B54A32D192ED03)


class Corpus:
    """A ring of tokens, in which new answers overwrite the oldest, with a hash table of places. `num_bytes`, the size
    of both, never changes."""

    def __init__(self, num_tokens: int) -> None:
        self._tokens: Ids = np.full(num_tokens, _END, np.int32)
        self._owners: Ids = np.zeros(num_tokens, np.int32)
        num_slots = 1 << (4 * max(num_tokens, 1) - 1).bit_length()
        self._shift = np.uint64(64 - num_slots.bit_length() + 1)
        self._places: Ids = np.zeros(num_slots, np.int32)
        self._head = 0
        self._num_written = 0
        self._next_owner = 1
        self._owner_by_name: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # number, tokens written with its last
        self.num_matches = 0

    @property
    def num_bytes(self) -> int:
        return int(self._tokens.nbytes + self._owners.nbytes + self._places.nbytes)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the ring."""
        return min(self._num_written, len(self._tokens))

    @property
    def num_owners(self) -> int:
        """Number of owners with tokens in the ring."""
        return len(self._owner_by_name)

    def add(self, owner: bytes, answer: Ids) -> None:
        """Add a finished answer of an owner, unless it is too short to be found. Of an answer longer than half the
        ring only the last half ring of tokens is added."""
        size = len(self._tokens)
        answer = answer[-(size // 2) :] if size else answer[:0]
        if len(answer) <= MAX_LENGTH:
            return
        if self._head + len(answer) + 1 > size:
            self._head = 0
        number = self._owner_by_name.get(owner, (self._next_owner, 0))[0]
        self._next_owner += number == self._next_owner
        start, end = self._head, self._head + len(answer)
        self._tokens[start:end], self._tokens[end] = answer, _END
        self._owners[start : end + 1] = number
        ends = np.arange(start + MAX_LENGTH, end)
        self._places[self._slots(hashes_at(self._tokens, ends), number)] = ends
        self._head = end + 1
        self._num_written += len(answer) + 1
        self._owner_by_name[owner] = number, self._num_written
        self._owner_by_name.move_to_end(owner)
        self._forget_owners()

    def _forget_owners(self) -> None:
        """Forget owners whose answers have all been overwritten: a lap of the ring leaves at most half of it unused."""
        while self._owner_by_name:
            owner, (_, last) = next(iter(self._owner_by_name.items()))
            if last > self._num_written - 2 * len(self._tokens):
                return
            del self._owner_by_name[owner]

    def _slots(self, hashes: Hashes, number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
        return ((hashes ^ np.uint64(number)) * _OWNER_FACTOR >> self._shift).astype(np.intp)

    def find(self, owner: bytes, text: Ids, end: int, hashes: Hashes, most: int) -> Match | None:
        """Return the longest match of the tokens before `end` of `text` at the places in the owner's answers that the
        hash table names, with up to `most` tokens that follow it. None without a match of two tokens or more, and up to
        MAX_LENGTH tokens of `text`. hashes: [len(LENGTHS)], of the text at `end`."""
        known = self._owner_by_name.get(owner)
        if known is None or end <= MAX_LENGTH:
            return None
        number, best, best_length = known[0], 0, 0
        for place in self._places[self._slots(hashes, number)].tolist():
            if place and place != best and self._owners[place] == number:
                length = min(match_length(text, end, self._tokens, place), self._owned_before(place, number))
                if length > best_length:
                    best, best_length = place, length
        if best_length < 2:
            return None
        following = self._tokens[best : best + most]
        is_end = (following == _END) | (self._owners[best : best + most] != number)
        following = following[: int(is_end.argmax())] if is_end.any() else following
        if not len(following):
            return None
        self.num_matches += 1
        return Match("corpus", best_length, following.tolist())

    def _owned_before(self, place: int, number: int) -> int:
        """Return how many tokens just before `place` belong to the owner `number`, at most LONGEST."""
        owners = self._owners[max(place - LONGEST, 0) : place]
        is_other = owners[::-1] != number
        return int(is_other.argmax()) if is_other.any() else len(owners)
