"""Survival: how likely each draft of a match is right, learned from the tokens that came after earlier matches."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from ....ipc.spec.config.speculation import MAX_DRAFTS
from .own_index import Match

_FIRST = (0.3, 0.45, 0.6, 0.75, 0.85)  # by length of the match, before anything is learned
_WEIGHT = 0.05  # of the newest match in the averages
_ROW_TRIALS = 4.0  # trials in a request's own record that weigh as much as the averages
_DECAY = 0.9  # factor of a request's own record with each match


class _Key(NamedTuple):
    source: str
    size: int
    position: int


class _Own(NamedTuple):
    """A request's own record: drafts that were right, and those that were right or the first wrong one."""

    hits: float = 0.0
    trials: float = 0.0


_NONE = _Own()


class Survival:
    """Owner of a moving average of acceptance for each source, length of match and position in the draft, given that
    all drafts before it were right; and, for each request, of the share of its recent drafts that were right."""

    def __init__(self) -> None:
        self._rates: dict[_Key, float] = {}
        self._own_by_request: defaultdict[object, dict[bool, _Own]] = defaultdict(dict)  # then: of the draft model

    def products(self, match: Match, request: object) -> list[float]:
        """Return, for each draft of a match, the probability that it and all before it are right."""
        own = self._own_by_request[request].get(bool(match.chances), _NONE)
        found, product = [], 1.0
        for position in range(min(len(match.token_ids), MAX_DRAFTS)):
            key, first = _key_of(match, position)
            rate = self._rates.get(key, first)
            product *= (rate * _ROW_TRIALS + own.hits) / (_ROW_TRIALS + own.trials)
            found.append(product)
        return found

    def learn(self, match: Match, request: object, num_right: int, *, is_wrong: bool) -> None:
        """Record that the first `num_right` drafts of a match were right, and whether the next one was wrong."""
        for position in range(num_right + is_wrong):
            (key, first), hit = _key_of(match, position), float(position < num_right)
            old = self._rates.get(key, first)
            self._rates[key] = old + _WEIGHT * (hit - old)
        owned = self._own_by_request[request]
        own = owned.get(bool(match.chances), _NONE)
        owned[bool(match.chances)] = _Own(_DECAY * own.hits + num_right, _DECAY * own.trials + num_right + is_wrong)

    def forget(self, request: object) -> None:
        self._own_by_request.pop(request, None)


def _key_of(match: Match, position: int) -> tuple[_Key, float]:
    """Return what a draft's rate is learned under, and the rate before anything is learned. The draft model says how
    likely its drafts are; how right it is in that is learned by the tenth, wherever the draft is."""
    if match.chances:
        tenth = min(int(10 * match.chances[position]), 9)
        return _Key(match.source, tenth, 0), (tenth + 0.5) / 10
    size = _size_of(match.length)
    return _Key(match.source, size, position), _FIRST[size]


def _size_of(length: int) -> int:
    """Return the size class of a match: 0 … 4 for 2, 3-4, 5-7, 8-15, or more tokens."""
    return 0 if length < 3 else 1 if length < 5 else 2 if length < 8 else 3 if length < 16 else 4
