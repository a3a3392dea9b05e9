"""Arena: shared memory for KV blocks on their way between the pool, this host's tiers and other places.

One memfd on each host, which the supervisor or the agent makes and workers and tier process inherit: nothing of it is
left when all have ended. It is divided into slots, numbered from 1. A slot holds one block: the parts of all ranks,
each on its host, side by side there.
The core decides which process may write a slot (core/kv/offload/); nothing here is locked.
"""

from __future__ import annotations

import mmap
import os

import msgspec

PAGE = 4096  # slots begin at a page, as O_DIRECT asks


class ArenaShape(msgspec.Struct, frozen=True):
    """Number and size of the slots."""

    num_slots: int
    slot_bytes: int  # of the content: the parts of all ranks, or of those on one host

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return -(-self.slot_bytes // PAGE) * PAGE

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.stride

    def share(self, num_ranks: int, num_all: int) -> ArenaShape:
        """Return the shape of the arena of a host with `num_ranks` of all ranks."""
        return ArenaShape(self.num_slots, self.slot_bytes * num_ranks // num_all)


def new_arena() -> int:
    """Make an empty arena and return its descriptor."""
    return os.memfd_create("tokenloom-arena", os.MFD_CLOEXEC)


class Arena:
    """The arena in this process's memory. `Arena.resize` comes first, in the process that made it."""

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
        """Give an arena its size; memory is taken when a page is first written, or by a PageSupply."""
        os.ftruncate(fd, shape.num_bytes)

    @classmethod
    def sized(cls, fd: int, shape: ArenaShape) -> Arena:
        """Give an arena its size, unless another process has, and map it: an agent does not know the size."""
        cls.resize(fd, shape)
        return cls(fd, shape)

    def close(self) -> None:
        """Unmap it; every view of a slot must be gone."""
        self._view.release()
        self.memory.close()
