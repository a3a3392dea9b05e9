"""Source: a place outside the arena that keeps blocks: a disk, a remote store, other engines.

The tier process calls a source from several threads at once (lane.py, finder.py). All errors of a source are data: a
method never raises for a disk or a network that fails, it answers "not here" and counts the failure in its state. A
source never changes a slot of the arena that it was not given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ...ipc.messages.tier import SourceName, SourceState


class Namespace(NamedTuple):
    """The common part of all objects of one model and one form of blocks."""

    digest: bytes  # 32 bytes; the root of the keys of all blocks
    secret: bytes  # of --kv-key-file: objects that leave this machine carry a MAC made with it; empty: none
    slot_bytes: int  # length of every object's payload


class Item(NamedTuple):
    """One block to read or to write."""

    key: bytes  # 32 bytes
    slot: memoryview  # its place in the arena: slot_bytes long, writable, page-aligned
    owner: int = 0  # number of the tenant, for quotas


class Source(Protocol):
    """Interface of a source. `open` is called first, and again for another namespace. Its maker gives it a function
    to call, from any thread, when its state has changed by itself, such as at the end of a scan."""

    name: SourceName
    num_loaders: int  # threads that call `load` at once
    load_batch: int  # largest number of items in a call of `load`; a cancelled load goes on to the end of a call
    store_batch: int  # the same of `store`

    def open(self, namespace: Namespace) -> None:
        """Start to serve the objects of `namespace`; return at once, and connect or scan in the background."""

    def find(self, keys: Sequence[bytes], deadline: float) -> int:
        """Return how many of the first keys are here in a row; 0 after the deadline (monotonic seconds) or a
        failure. Keys that come out as found may still fail to load."""

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
        """Read each item into its slot and check it; call `on_loaded(i, is_good)` exactly once for each, in any order,
        when its slot is no longer written."""

    def store(self, items: Sequence[Item]) -> list[bool]:
        """Write the items, and return for each whether it is now here; an object that is here already is."""

    def clear(self) -> None:
        """Remove all objects of the namespace, also those that are being written."""

    def state(self) -> SourceState:
        """Return its state but for `queued_bytes`."""

    def close(self) -> None:
        """Stop threads and close files and connections."""
