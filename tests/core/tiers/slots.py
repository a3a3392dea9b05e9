"""Slots for the tests of sources, the content of blocks, and an opened disk source."""

from __future__ import annotations

import hashlib
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tokenloom.core.tiers.disk import DiskSource
from tokenloom.core.tiers.disk_folder import MARKER
from tokenloom.core.tiers.object_file import ObjectFiles
from tokenloom.core.tiers.source import Item, Namespace, Source
from tokenloom.ipc.messages.tier import SourceState
from tokenloom.ipc.process.arena import PAGE
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 20.0
SLOT_BYTES = 2 * PAGE
OBJECT_BYTES = ObjectFiles.size(SLOT_BYTES)
NAMESPACE = Namespace(hashlib.sha256(b"namespace").digest(), b"", (SLOT_BYTES,))
SECRET = b"a secret of all engines"
SIGNED = NAMESPACE._replace(secret=SECRET)


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def content_of(key: bytes, num_bytes: int = SLOT_BYTES) -> bytes:
    """Return the content of a block, noise that depends on its key."""
    return np.random.default_rng(list(key)).bytes(num_bytes)


def new_slots(count: int, num_bytes: int = SLOT_BYTES) -> list[memoryview]:
    """Return page-aligned places, filled with 0xEE."""
    stride = -(-num_bytes // PAGE) * PAGE
    memory = memoryview(mmap.mmap(-1, count * stride))
    memory[:] = b"\xee" * len(memory)
    return [memory[start : start + num_bytes] for start in range(0, count * stride, stride)]


def filled(numbers: Sequence[int], owner: int = 0, num_bytes: int = SLOT_BYTES) -> list[Item]:
    """Return blocks with their content in slots."""
    items = [item._replace(owner=owner) for item in empty(numbers, num_bytes)]
    for item in items:
        item.slot[:] = content_of(item.key, num_bytes)
    return items


def empty(numbers: Sequence[int], num_bytes: int = SLOT_BYTES) -> list[Item]:
    """Return blocks with other content in their slots."""
    return [
        Item(key_of(number), slot) for number, slot in zip(numbers, new_slots(len(numbers), num_bytes), strict=True)
    ]


def load(
    source: Source, numbers: Sequence[int], limit_s: float = DEADLINE_S, num_bytes: int = SLOT_BYTES
) -> list[bool]:
    """Load blocks into new slots; return for each whether it is good. Checks the content of those that are, and that
    no slot changes after its report."""
    items, results, seen = empty(numbers, num_bytes), dict[int, bool](), dict[int, bytes]()

    def on_loaded(index: int, is_good: bool) -> None:
        assert index not in results, "reported twice"
        results[index], seen[index] = is_good, bytes(items[index].slot)

    source.load(items, time.monotonic() + limit_s, on_loaded)
    assert sorted(results) == list(range(len(items)))
    for index, item in enumerate(items):
        assert item.slot == seen[index], "a slot was written after its report"
        assert not results[index] or item.slot == content_of(item.key, num_bytes), "a block with the content of another"
    return [results[index] for index in range(len(items))]


def find(source: Source, numbers: Sequence[int], limit_s: float = DEADLINE_S, num_bytes: int = SLOT_BYTES) -> int:
    return source.find([key_of(number) for number in numbers], num_bytes, time.monotonic() + limit_s)


def wait_for(source: Source, holds: Callable[[SourceState], bool]) -> SourceState:
    """Wait until the state of a source is so."""
    return wait_until(lambda: state if holds(state := source.state()) else None, "the state of the source")


def open_disk(root: Path, max_bytes: int = 1 << 30, quota: float = 1.0, namespace: Namespace = NAMESPACE) -> DiskSource:
    """Return a source that has started, well or not."""
    has_started = threading.Event()
    source = DiskSource(root, max_bytes, quota, has_started.set)
    reopen(source, namespace, has_started)
    return source


def disk_with(root: Path, numbers: Sequence[int]) -> DiskSource:
    """Return a source that has these blocks."""
    source = open_disk(root)
    assert all(source.store(filled(numbers)))
    return source


def reopen(source: DiskSource, namespace: Namespace, has_started: threading.Event) -> None:
    has_started.clear()
    source.open(namespace)
    wait_for_start(source, has_started)


def wait_for_start(source: DiskSource, has_started: threading.Event) -> None:
    assert has_started.wait(DEADLINE_S) and source._opening.acquire(timeout=DEADLINE_S)
    source._opening.release()


def path_of(source: DiskSource, number: int) -> Path:
    """Return the file of a block without an owner."""
    assert source._view is not None
    return Path(source._view.path(key_of(number), 0))


def files_of(root: Path) -> list[Path]:
    """Return the files of objects, those that are being written too."""
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name not in (".lock", MARKER))
