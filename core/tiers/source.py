"""Source: a place outside the arena that keeps blocks: a disk, a remote store, other engines.

The tier process calls a source from several threads at once (lane.py, finder.py). Errors of a source are data: if a
disk or network fails, a method does not raise, but answers "not here" and counts the failure in the source's state. A
source never changes a slot of the arena that it was not given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ...ipc.messages.tier import SourceName, SourceState


class Namespace(NamedTuple):
    """Common properties of all objects of one model and one form of blocks."""

    digest: bytes  # 32 bytes: the root of all keys; if ranks are on several hosts, made from it and this host's ranks
    secret: bytes  # from --kv-key-file, for the MAC of objects that leave this machine; empty: no MAC
    slot_bytes: tuple[int, ...]  # by KV group: the length of its objects' payloads


class Item(NamedTuple):
    """One block to read or write."""

    key: bytes  # 32 bytes: the block's name
    slot: memoryview  # the block's place in the arena: as long as its payload, writable, page-aligned
    owner: int = 0  # the tenant's number, for quotas


def num_within(sizes: Iterable[int], limit: int) -> int:
    """Return how many of the first sizes have a sum of at most `limit`; at least 1 if there are any."""
    count = total = 0
    for size in sizes:
        total += size
        if count and total > limit:
            break
        count += 1
    return count


class Source(Protocol):
    """Interface of a source. `open` is called first, and again for another namespace.

    The constructor gets a function to call, from any thread, when the state changes without a call from outside, such
    as at the end of a scan."""

    name: SourceName
    num_loaders: int  # number of threads that may call `load` at the same time
    load_batch: int  # most items in a call of `load`; a cancelled load still completes its call
    store_batch: int  # most items in a call of `store`

    def open(self, namespace: Namespace) -> None:
        """Start to serve the objects of `namespace`. Returns at once; connects or scans in the background."""

    def find(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> int:
        """Return how many of the first keys the source has without a gap, with payloads of `num_bytes`, as far as it
        can tell by the deadline (monotonic seconds); 0 after a failure. Loading a block may fail although it was
        found."""

    def may_have(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> list[bool]:
        """Return for each key whether `find` may find it. That is a hint, which saves questions, and no use of a
        block."""

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
        """Read each item into its slot and check it. Call `on_loaded(i, is_good)` exactly once for each item, in any
        order, when its slot is no longer written; items that are not read by the deadline are not good."""

    def store(self, items: Sequence[Item]) -> list[bool]:
        """Write the items, and return for each whether the source now has it; an object that it had before counts as
        written."""

    def clear(self) -> None:
        """Remove all objects of the namespace that this engine may remove. The caller sees to it that none is being
        written. After a failure, which is counted, some may be left."""

    def state(self) -> SourceState:
        """Return the source's state, except `queued_bytes`."""

    def close(self) -> None:
        """Stop threads, and close files and connections."""
