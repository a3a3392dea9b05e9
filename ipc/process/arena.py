"""Arena: shared memory for KV blocks on their way between the pool, this host's tiers and other places.

The arena is one memfd on each host. The supervisor or the host's agent makes it; workers and tier process inherit it,
and the memory is freed when all of them have ended. It is divided into slots, numbered from 1. A slot holds one block:
the parts of the host's ranks, one after another.
There are no locks: the core decides which process may write to a slot (core/features/tiers/).
"""

from __future__ import annotations

import mmap
import os

import msgspec

PAGE = 4096  # slots start at a page, as O_DIRECT requires


class ArenaShape(msgspec.Struct, frozen=True):
    """Number and size of the slots."""

    num_slots: int
    slot_bytes: int  # size of a slot's content: the parts of all ranks, or of those on one host

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return -(-self.slot_bytes // PAGE) * PAGE

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.stride

    def share(self, num_ranks: int, num_all: int) -> ArenaShape:
        """Return the shape of the arena on a host with `num_ranks` of the `num_all` ranks."""
        return ArenaShape(self.num_slots, self.slot_bytes * num_ranks // num_all)


def new_arena() -> int:
    """Make an empty arena and return its descriptor."""
    return os.memfd_create("tokenloom-arena", os.MFD_CLOEXEC)


class Arena:
    """The arena, mapped into this process. The memfd must have its size before: see `resize` and `sized`."""

    def __init__(self, fd: int, shape: ArenaShape) -> None:
        self.shape = shape
        self.memory = mmap.mmap(fd, shape.num_bytes)
        self._view = memoryview(self.memory)

    def slot(self, number: int) -> memoryview:
        """Return the content of a slot, writable."""
        start = (number - 1) * self.shape.stride
        return self._view[start : start + self.shape.slot_bytes]

    @staticmethod
    def resize(fd: int, shape: ArenaShape) -> None:
        """Set an arena's size; memory is allocated when a page is first written, or by a PageSupply."""
        os.ftruncate(fd, shape.num_bytes)

    @classmethod
    def sized(cls, fd: int, shape: ArenaShape) -> Arena:
        """Set an arena's size, which may be set already, and map it. For processes of a host whose agent made the arena
        without knowing the size."""
        cls.resize(fd, shape)
        return cls(fd, shape)

    def close(self) -> None:
        """Unmap the arena; all views of slots must have been released."""
        self._view.release()
        self.memory.close()
