"""Counts of an object's pairs, minProperties and maxProperties, as states of its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .....ipc.errors import RequestError
from ..schemas.schema import Schema

MAX_STATES = 4096


class Counts(NamedTuple):
    """The least and the most pairs of an object; None: any number."""

    low: int
    high: int | None

    @property
    def cap(self) -> int:
        """The count from which on more pairs make no difference, or are not allowed."""
        return self.low if self.high is None else self.high

    def after(self, count: int) -> int:
        """Return the count of one more pair, as far as it makes a difference."""
        return count + 1 if self.high is not None else min(count + 1, self.cap)

    def is_full(self, count: int) -> bool:
        return self.high is not None and count >= self.high


def counts_of(own: Schema) -> Counts:
    """Return the counts of an object's schema, without those that all its objects meet anyway. RequestError if its
    rules would have too many states."""
    low, high = own.get("minProperties", 0), own.get("maxProperties")
    is_closed = own.get("additionalProperties", True) is False and not own.get("patternProperties")
    num_named = len({*own.get("properties", {}), *own.get("required", ())})
    if low <= len({*own.get("required", ())}):
        low = 0
    if high is not None and is_closed and high >= num_named:
        high = None
    counts = Counts(low, high)
    if (num_named + 2) * counts.cap > MAX_STATES:
        raise RequestError(
            f"structured_outputs.json: minProperties {low} or maxProperties {high} beside {num_named} properties is "
            "too much for the form of this model's calls: lower the count, or name fewer properties"
        )
    return counts


def counted_list(
    named: Sequence[tuple[str, bool]], other: str, counts: Counts, comma: str, rule: Callable[[str], str]
) -> str | None:
    """Return an expression for pairs in order with commas between them, as many as `counts` allows; None if none
    conform. named: the rule of each, and whether it is required; other: a rule for a pair that may be repeated behind
    them, "" for none. `rule` adds a definition and returns its name."""
    low, high = counts
    behind: list[str | None] = [_others(other, low - count, high, count, comma) for count in range(len(named) + 1)]
    for place in reversed(range(len(named))):
        pair, is_required = named[place]
        now: list[str | None] = []
        for count in range(place + 1):
            separator = f"{comma} " * (count > 0)
            ways = []
            if (taken := behind[count + 1]) is not None and not counts.is_full(count):
                ways.append(f"{separator}{pair} {taken}")
            if (skipped := behind[count]) is not None and not is_required:
                ways.append(skipped)
            now.append(rule(" | ".join(ways)) if ways else None)
        behind = now
    return behind[0]


def _others(other: str, low: int, high: int | None, count: int, comma: str) -> str | None:
    """Return an expression for at least `low` others behind `count` pairs, and at most `high` pairs together."""
    low = max(0, low)
    most = None if high is None else high - count
    if most is not None and most < low:
        return None
    if not other:
        return '""' if low == 0 else None
    if most == 0:
        return '""'
    if count:
        return f"({comma} {other}){{{low},{'' if most is None else most}}}"
    more = f"{other} ({comma} {other}){{{max(0, low - 1)},{'' if most is None else most - 1}}}"
    return more if low else f"({more})?"
