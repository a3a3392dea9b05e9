"""Arena: shared memory for KV blocks on their way between the pool, this host's tiers and other places.

The arena is one memfd on each host. The supervisor or the host's agent makes it; workers and tier process inherit it,
and the memory is freed when all of them have ended. It is divided into slots. A slot holds one block of a KV group: the
parts of the host's ranks, one after another. Like the pool (kv/pool_shape.py), the arena is cut into slabs, each of
which has the slots of one group at a time; with one group a slab is a slot.
There are no locks: the core decides which process may write to a slot (core/features/tiers/).
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence

import msgspec

from ..errors import ProtocolError
from ..kv.pool_shape import PoolShape

PAGE = 4096  # slots start at a page, as O_DIRECT requires


class ArenaShape(msgspec.Struct, frozen=True):
    """Number and size of the slots, the same in all processes but for the bytes of the ranks of other hosts.

    Slabs are numbered from 1; slot i of a group that has n slots in a slab is in slab i // n, so that its first slot is
    n. A slot's number names its group, too: i · number of groups + group. With one group the slots are numbered from
    1."""

    num_slabs: int
    slots_of_slab: tuple[int, ...]  # by group
    slot_bytes: tuple[int, ...]  # by group, size of a slot's content: the parts of all ranks, or of those on one host

    @classmethod
    def of(cls, slot_bytes: Sequence[int], num_bytes: int) -> ArenaShape:
        """Return the shape of an arena of at most `num_bytes`. slot_bytes: by group. Slabs are as in PoolShape.of, with
        whole pages for blocks."""
        pages = [_whole_pages(size) for size in slot_bytes]
        slabs = PoolShape.of(num_bytes, pages)
        return cls(slabs.num_slabs, tuple(slabs.slab_bytes // size for size in pages), tuple(slot_bytes))

    @property
    def num_groups(self) -> int:
        return len(self.slot_bytes)

    def stride(self, group: int) -> int:
        """Return the bytes from a slot of the group to the next."""
        return _whole_pages(self.slot_bytes[group])

    @property
    def slab_bytes(self) -> int:
        """Bytes from one slab to the next."""
        return max(count * self.stride(group) for group, count in enumerate(self.slots_of_slab))

    @property
    def num_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def ids(self) -> PoolShape:
        """The slots as the blocks of a pool, whose slab 0 the arena does not have. Its unit is no byte: each slot takes
        an equal part of a slab."""
        unit = math.lcm(*self.slots_of_slab)
        return PoolShape(self.num_slabs + 1, unit, tuple(unit // count for count in self.slots_of_slab))

    def group_of(self, number: int) -> int:
        """Return the group of the slot with this number."""
        return number % self.num_groups

    def bytes_of(self, number: int) -> int:
        """Return the size of the content of the slot with this number."""
        return self.slot_bytes[number % self.num_groups]

    def place_of(self, number: int) -> tuple[int, int]:
        """Return the slab of the slot with this number, counted from 0, and its index among the slab's slots."""
        slot, group = divmod(number, self.num_groups)
        slab, index = divmod(slot, self.slots_of_slab[group])
        return slab - 1, index

    def check(self, numbers: Sequence[int]) -> None:
        """Raise ProtocolError unless all are numbers of slots."""
        num_groups = self.num_groups
        for group, first in enumerate(self.slots_of_slab):
            given = [number for number in numbers if number % num_groups == group] if num_groups > 1 else numbers
            if not given:
                continue
            lowest, highest, last = min(given) // num_groups, max(given) // num_groups, first * (self.num_slabs + 1) - 1
            if lowest < first or highest > last:
                of_group = f" of KV group {group}" * (num_groups > 1)
                raise ProtocolError(f"slots {lowest} to {highest}{of_group} are not all in [{first}, {last}]")

    def share(self, num_ranks: int, num_all: int) -> ArenaShape:
        """Return the shape of the arena on a host with `num_ranks` of the `num_all` ranks."""
        sizes = tuple(size * num_ranks // num_all for size in self.slot_bytes)
        return ArenaShape(self.num_slabs, self.slots_of_slab, sizes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


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
        """Return the content of the slot with this number, writable."""
        slab, index = self.shape.place_of(number)
        group = self.shape.group_of(number)
        start = slab * self.shape.slab_bytes + index * self.shape.stride(group)
        return self._view[start : start + self.shape.slot_bytes[group]]

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
