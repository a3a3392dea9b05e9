"""Calls of the sources that other engines share, with checks of their blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tokenloom.core.tiers.source import Source
from tokenloom.ipc.messages.tier import SourceState
from tokenloom.tests.core.tiers.slots import NAMESPACE, content_of, empty, key_of
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 20.0
SECRET = b"a secret of all engines"
SIGNED = NAMESPACE._replace(secret=SECRET)


def load(source: Source, numbers: Sequence[int], limit_s: float = DEADLINE_S) -> list[bool]:
    """Load blocks into new slots; return for each whether it is good. Checks the content of those that are, and that
    no slot changes after its report."""
    items, results, seen = empty(numbers), dict[int, bool](), dict[int, bytes]()

    def on_loaded(index: int, is_good: bool) -> None:
        assert index not in results, "reported twice"
        results[index], seen[index] = is_good, bytes(items[index].slot)

    source.load(items, time.monotonic() + limit_s, on_loaded)
    assert sorted(results) == list(range(len(items)))
    for index, item in enumerate(items):
        assert item.slot == seen[index], "a slot was written after its report"
        assert not results[index] or item.slot == content_of(item.key), "a block with the content of another"
    return [results[index] for index in range(len(items))]


def find(source: Source, numbers: Sequence[int], limit_s: float = DEADLINE_S) -> int:
    return source.find([key_of(number) for number in numbers], time.monotonic() + limit_s)


def wait_for(source: Source, holds: Callable[[SourceState], bool]) -> SourceState:
    """Wait until the state of a source is so."""
    return wait_until(lambda: state if holds(state := source.state()) else None, "the state of the source")
