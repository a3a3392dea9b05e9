"""KeptLast: free blocks of which those that are to be kept are reused after all others."""

from __future__ import annotations

from collections import OrderedDict

from .reuse_order import InParts, UsefulBlocks


class KeptLast(InParts):
    """Useful blocks in two parts, each in order of time: kept ones, which are reused last, and `others`.

    Invariant: a block that is here is in the part that `keep` and `release` have said last."""

    def __init__(self, others: UsefulBlocks) -> None:
        self._others = others
        self._kept_ids: set[int] = set()  # also of blocks that are not here now
        self._kept: OrderedDict[int, int] = OrderedDict()
        super().__init__(others, self._kept)

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

    def popitem(self, *, last: bool) -> tuple[int, int]:
        if len(self._others):
            return self._others.popitem(last=last)
        return self._kept.popitem(last=last)
