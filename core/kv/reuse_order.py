"""The order in which free blocks of a group are reused.

A group that has all of the memory reuses them in order of time. A group that shares the memory fills its slabs: it
prefers the block of the slab that has the most referenced blocks, so that other slabs become idle, and other groups can
take them. Knows no keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Protocol


class SpareBlocks(Protocol):
    """Interface of a collection of free blocks with content of no use, or with none. A list is one: the block
    that was added last is reused first."""

    def append(self, block: int, /) -> None: ...

    def pop(self) -> int:
        """Remove the block that is reused next, and return it."""
        ...

    def remove(self, block: int, /) -> None: ...

    def __iter__(self) -> Iterator[int]: ...

    def __contains__(self, block: object, /) -> bool: ...

    def __len__(self) -> int: ...


class UsefulBlocks(Protocol):
    """Interface of a collection of free blocks with content that may be of use, with their stamps of last use. An
    OrderedDict is one: the block that was added first is reused first."""

    def __setitem__(self, block: int, stamp: int, /) -> None: ...

    def get(self, block: int, default: int, /) -> int: ...

    def pop(self, block: int, default: None, /) -> int | None: ...

    def popitem(self, *, last: bool) -> tuple[int, int]: ...

    def items(self) -> Iterable[tuple[int, int]]: ...

    def values(self) -> Iterable[int]: ...

    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int: ...


class InParts:
    """Base of useful blocks in two parts, each in order of time. A block is in one of them at most."""

    def __init__(self, first: UsefulBlocks, second: UsefulBlocks) -> None:
        self._first, self._second = first, second

    def get(self, block: int, default: int) -> int:
        return self._first.get(block, self._second.get(block, default))

    def pop(self, block: int, default: None) -> int | None:
        stamp = self._first.pop(block, None)
        return self._second.pop(block, default) if stamp is None else stamp

    def items(self) -> Iterable[tuple[int, int]]:
        return chain(self._first.items(), self._second.items())

    def values(self) -> Iterable[int]:
        return chain(self._first.values(), self._second.values())

    def __iter__(self) -> Iterator[int]:
        return chain(self._first, self._second)

    def __len__(self) -> int:
        return len(self._first) + len(self._second)


class OldestFirst:
    """Spare blocks of which the one that was added first is reused first."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def append(self, block: int) -> None:
        self._blocks[block] = None

    def pop(self) -> int:
        block = next(iter(self._blocks))
        del self._blocks[block]
        return block

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)


class FullestFirst:
    """Spare blocks of which one in the slab with the most referenced blocks is reused first, and of equal slabs the one
    that had this number first.

    Invariant: a slab with spare blocks is in the set of its number of referenced blocks, `_slabs_by_count`; the bits of
    `_counts` are the numbers whose set has any."""

    def __init__(self, num_used: Mapping[int, int], slab_bytes: int, block_bytes: int) -> None:
        """num_used: by slab, the number of its referenced blocks; report each change to `recount`."""
        self._num_used = num_used
        self._slab_bytes, self._block_bytes = slab_bytes, block_bytes
        self._blocks_by_slab: dict[int, dict[int, None]] = {}
        self._slabs_by_count: list[dict[int, None]] = [{} for _ in range(slab_bytes // block_bytes + 1)]
        self._counts = 0
        self._num_blocks = 0

    def has_used(self) -> bool:
        """Return whether the next block is of a slab with referenced blocks."""
        return self._counts > 1

    def append(self, block: int) -> None:
        slab = block * self._block_bytes // self._slab_bytes
        blocks = self._blocks_by_slab.get(slab)
        if blocks is None:
            blocks = self._blocks_by_slab[slab] = {}
            self._add_slab(slab, self._num_used[slab])
        blocks[block] = None
        self._num_blocks += 1

    def pop(self) -> int:
        fullest = self._slabs_by_count[self._counts.bit_length() - 1]
        block = next(iter(self._blocks_by_slab[next(iter(fullest))]))
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        slab = block * self._block_bytes // self._slab_bytes
        blocks = self._blocks_by_slab[slab]
        del blocks[block]
        self._num_blocks -= 1
        if not blocks:
            del self._blocks_by_slab[slab]
            self._remove_slab(slab, self._num_used[slab])

    def recount(self, slab: int, before: int, after: int) -> None:
        """Report that the number of referenced blocks of a slab has changed."""
        if slab in self._blocks_by_slab:
            self._remove_slab(slab, before)
            self._add_slab(slab, after)

    def _add_slab(self, slab: int, count: int) -> None:
        self._slabs_by_count[count][slab] = None
        self._counts |= 1 << count

    def _remove_slab(self, slab: int, count: int) -> None:
        slabs = self._slabs_by_count[count]
        del slabs[slab]
        if not slabs:
            self._counts &= ~(1 << count)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._blocks_by_slab.values())

    def __contains__(self, block: object) -> bool:
        slab = -1 if not isinstance(block, int) else block * self._block_bytes // self._slab_bytes
        return block in self._blocks_by_slab.get(slab, ())

    def __len__(self) -> int:
        return self._num_blocks

    def check_invariants(self) -> None:
        """Raise AssertionError unless each slab with spare blocks is found by its number of referenced blocks."""
        count_by_slab = {slab: count for count, slabs in enumerate(self._slabs_by_count) for slab in slabs}
        assert count_by_slab == {slab: self._num_used[slab] for slab in self._blocks_by_slab}
        assert self._counts == sum(1 << count for count, slabs in enumerate(self._slabs_by_count) if slabs)
        assert self._num_blocks == len([*self])


class FullestOfOlder:
    """Useful blocks of which those of the older half are reused first, fullest slab first: a part of the order of time
    is given up for idle slabs.

    Invariant: each block is in `_younger` or `_older`; those in `_older` were added first."""

    def __init__(self, older: FullestFirst) -> None:
        self._older = older
        self._younger: OrderedDict[int, None] = OrderedDict()
        self._stamps: dict[int, int] = {}  # in order of time

    def has_used(self) -> bool:
        """Return whether the next block is of a slab with referenced blocks."""
        self._halve()
        return self._older.has_used()

    def _halve(self) -> None:
        """Move blocks that count as older by now: those before a reuse, so that other changes cost nothing."""
        while len(self._older) < len(self._younger):
            self._older.append(self._younger.popitem(last=False)[0])

    def __setitem__(self, block: int, stamp: int) -> None:
        self._stamps[block] = stamp
        self._younger[block] = None

    def get(self, block: int, default: int) -> int:
        return self._stamps.get(block, default)

    def pop(self, block: int, default: None) -> int | None:
        stamp = self._stamps.pop(block, default)
        if stamp is not None:
            if block in self._younger:
                del self._younger[block]
            else:
                self._older.remove(block)
        return stamp

    def popitem(self, *, last: bool) -> tuple[int, int]:
        assert not last
        self._halve()
        block = self._older.pop()
        return block, self._stamps.pop(block)

    def items(self) -> ItemsView[int, int]:
        return self._stamps.items()

    def values(self) -> ValuesView[int]:
        return self._stamps.values()

    def __iter__(self) -> Iterator[int]:
        return iter(self._stamps)

    def __len__(self) -> int:
        return len(self._stamps)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the two parts have all blocks, in order of time."""
        in_order = [*self._stamps]
        assert {*self._older} == {*in_order[: len(self._older)]} and [*self._younger] == in_order[len(self._older) :]
