"""KeptLast: free blocks of which those that are to be kept are reused after all others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

from .reuse_order import UsefulBlocks


class KeptLast:
    """Useful blocks in two parts, each in order of time: kept ones, which are reused last, and `others`.

    Invariant: a block that is here is in the part that `keep` and `release` have said last."""

    def __init__(self, others: UsefulBlocks) -> None:
        self._others = others
        self._kept_ids: set[int] = set()  # also of blocks that are not here now
        self._kept: OrderedDict[int, int] = OrderedDict()

    def keep(self, block: int) -> None:
        """Let a block be reused last, whether it is here now or comes later."""
        self._kept_ids.add(block)
        if (stamp := self._others.pop(block, None)) is not None:
            self._kept[block] = stamp

    def release(self, block: int) -> None:
        """Let a kept block be reused like the others, as if it had been used now."""
        self._kept_ids.discard(block)
        if (stamp := self._kept.pop(block, None)) is not None:
            self._others[block] = stamp

    def __setitem__(self, block: int, stamp: int) -> None:
        if block in self._kept_ids:
            self._kept[block] = stamp
        else:
            self._others[block] = stamp

    def get(self, block: int, default: int) -> int:
        return self._others.get(block, self._kept.get(block, default))

    def pop(self, block: int, default: None) -> int | None:
        stamp = self._others.pop(block, None)
        return self._kept.pop(block, default) if stamp is None else stamp

    def popitem(self, *, last: bool) -> tuple[int, int]:
        if len(self._others):
            return self._others.popitem(last=last)
        return self._kept.popitem(last=last)

    def items(self) -> Iterable[tuple[int, int]]:
        return chain(self._others.items(), self._kept.items())

    def values(self) -> Iterable[int]:
        return chain(self._others.values(), self._kept.values())

    def __iter__(self) -> Iterator[int]:
        return chain(self._others, self._kept)

    def __len__(self) -> int:
        return len(self._others) + len(self._kept)
