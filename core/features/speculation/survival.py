"""Survival: how likely each draft of a match is right, learned from the tokens that came after earlier matches."""

from __future__ import annotations

from collections import defaultdict

from ....ipc.spec.config.speculation import MAX_DRAFTS
from .own_index import Match

_FIRST = (0.3, 0.45, 0.6, 0.75, 0.85)  # by length of the match, before anything is learned
_WEIGHT = 0.05  # of the newest match in the averages
_ROW_TRIALS = 4.0  # trials in a request's own record that weigh as much as the averages
_DECAY = 0.9  # factor of a request's own record with each match


class Survival:
    """Owner of a moving average of acceptance for each source, length of match and position in the draft, given that
    all drafts before it were right; and, for each request, of the share of its recent drafts that were right."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, int, int], float] = {}
        self._hits_by_request: defaultdict[object, float] = defaultdict(float)
        self._trials_by_request: defaultdict[object, float] = defaultdict(float)

    def products(self, match: Match, request: object) -> list[float]:
        """Return, for each draft of a match, the probability that it and all before it are right."""
        hits, trials = self._hits_by_request[request], self._trials_by_request[request]
        found, product = [], 1.0
        size = _size_of(match.length)
        for position in range(min(len(match.token_ids), MAX_DRAFTS)):
            rate = self._rates.get((match.source, size, position), _FIRST[size])
            product *= (rate * _ROW_TRIALS + hits) / (_ROW_TRIALS + trials)
            found.append(product)
        return found

    def learn(self, match: Match, request: object, num_right: int, *, is_wrong: bool) -> None:
        """Record that the first `num_right` drafts of a match were right, and whether the next one was wrong."""
        size = _size_of(match.length)
        for position in range(num_right + is_wrong):
            key, hit = (match.source, size, position), float(position < num_right)
            old = self._rates.get(key, _FIRST[size])
            self._rates[key] = old + _WEIGHT * (hit - old)
        self._hits_by_request[request] = _DECAY * self._hits_by_request[request] + num_right
        self._trials_by_request[request] = _DECAY * self._trials_by_request[request] + num_right + is_wrong

    def forget(self, request: object) -> None:
        self._hits_by_request.pop(request, None)
        self._trials_by_request.pop(request, None)


def _size_of(length: int) -> int:
    """Return the size class of a match: 0 … 4 for 2, 3-4, 5-7, 8-15, or more tokens."""
    return 0 if length < 3 else 1 if length < 5 else 2 if length < 8 else 3 if length < 16 else 4
