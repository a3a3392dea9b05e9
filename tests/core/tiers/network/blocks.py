"""Blocks and slots for the tests of sources that other engines share."""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Callable, Sequence

import numpy as np

from tokenloom.core.tiers.source import Item, Namespace, Source
from tokenloom.ipc.messages.tier import SourceState
from tokenloom.ipc.process.arena import PAGE

DEADLINE_S = 20.0
SLOT_BYTES = 6 * PAGE
SECRET = b"a secret of all engines"
NAMESPACE = Namespace(hashlib.sha256(b"namespace").digest(), b"", SLOT_BYTES)
SIGNED = NAMESPACE._replace(secret=SECRET)


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def content_of(key: bytes, num_bytes: int = SLOT_BYTES) -> bytes:
    """Return the content of a block, noise that depends on its key."""
    return np.random.default_rng(list(key)).bytes(num_bytes)


def empty(numbers: Sequence[int], num_bytes: int = SLOT_BYTES) -> list[Item]:
    """Return blocks with other bytes in their slots."""
    return [Item(key_of(number), memoryview(mmap.mmap(-1, num_bytes))) for number in numbers]


def filled(numbers: Sequence[int], num_bytes: int = SLOT_BYTES) -> list[Item]:
    """Return blocks with their content in slots."""
    items = empty(numbers, num_bytes)
    for item in items:
        item.slot[:] = content_of(item.key, num_bytes)
    return items


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


def wait_for(source: Source, holds: Callable[[SourceState], bool], limit_s: float = DEADLINE_S) -> SourceState:
    """Wait until the state of a source is so."""
    deadline = time.monotonic() + limit_s
    while not holds(state := source.state()):
        assert time.monotonic() < deadline, state
        time.sleep(0.005)
    return state


def wait_until(is_so: Callable[[], bool], limit_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)
