"""SessionPool: a pool that keeps what a conversation in its pause will need, while other requests pass through.

Free blocks with content are of two kinds:

    fresh      no later request has needed the block
    continued  a later request has needed it, or it was computed where a request went on from the end of another

The oldest block of each kind stands for it, and a fresh one counts as `weight` times as old as it is. The pool learns
the weight: it remembers the keys of blocks that were reused lately, and a request that computes one of them again shows
that its kind was kept too briefly. At weight 1, with which a pool begins, the order is that of time alone.

The two kinds and the memory of keys are those of ARC (Megiddo and Modha, 2003). There the kinds have shares of the
memory; here they have ages, so that nothing changes before something was learned. Knows no tokens and no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from .block_pool import BlockObserver, BlockPool
from .reuse_order import InParts, UsefulBlocks

_MAX_LOG_WEIGHT = 8.0  # of 2
_GAIN = 8.0  # a quarter of it is the power of 2 by which as many blocks as are remembered change the weight
_DOUBT = 2.0  # how much more a fresh block counts than a continued one: chance alone shall not lead away from time
_FRESH, _CONTINUED = range(2)  # kinds


class ByWeightedAge(InParts):
    """Free blocks with content, in two kinds. Ages are counted in blocks that were freed."""

    def __init__(self, num_blocks: int) -> None:
        self.kinds = bytearray(num_blocks)  # of all blocks; counts from the next time that a block is freed
        self._fresh = OrderedDict[int, int]()  # block → clock when it was freed
        self._continued = OrderedDict[int, int]()
        super().__init__(self._fresh, self._continued)
        self._clock = 0
        self.num_blocks = 0  # that are among these
        self.log_weight = 0.0

    def __setitem__(self, block: int, stamp: int) -> None:
        self._clock += 1
        self.num_blocks += 1
        if self.kinds[block]:
            self._continued[block] = self._clock
        else:
            self._fresh[block] = self._clock

    def pop(self, block: int, default: None) -> int | None:
        stamp = super().pop(block, default)
        self.num_blocks -= stamp is not None
        return stamp

    def popitem(self, *, last: bool) -> tuple[int, int]:
        assert not last
        fresh, continued = self._fresh, self._continued
        self.num_blocks -= 1
        if not fresh:
            return continued.popitem(last=False)
        if continued:
            age = self._clock - next(iter(fresh.values()))
            if age * 2.0**self.log_weight < self._clock - next(iter(continued.values())):
                return continued.popitem(last=False)
        return fresh.popitem(last=False)

    def __len__(self) -> int:
        return self.num_blocks


class SessionPool(BlockPool):
    """A BlockPool that is told which blocks later requests need, and where requests end.

    Invariant: a block without a key is fresh, and no request ended with it."""

    def __init__(
        self, num_blocks: int, observers: Sequence[BlockObserver] = (), key_by_block: Mapping[int, bytes] | None = None
    ) -> None:
        self._order = ByWeightedAge(num_blocks)
        self._kinds = self._order.kinds
        self._is_end = bytearray(num_blocks)  # a request ended with the block
        super().__init__(num_blocks, observers, key_by_block)
        self._gone = OrderedDict[bytes, bool](), OrderedDict[bytes, bool]()

    @property
    def num_free(self) -> int:
        if self._free is not self._order:  # some are kept
            return super().num_free
        return len(self._empty) + len(self._demoted) + self._order.num_blocks  # hot: a call less

    def _new_useful(self) -> UsefulBlocks:
        return self._order

    @property
    def log_weight(self) -> float:
        """The logarithm, to base 2, of the number of times as old as it is that a fresh block counts."""
        return self._order.log_weight

    def note_needed(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._ref_count[block] == 0:
                self._kinds[block] = _CONTINUED

    def note_end(self, blocks: Sequence[int], num_found: int) -> None:
        goes_on = 0 < num_found <= len(blocks) and self._is_end[blocks[num_found - 1]]
        for block in blocks[num_found:] if goes_on else ():
            if self._key_by_block[block] is not None:
                self._kinds[block] = _CONTINUED
        if blocks and self._key_by_block[blocks[-1]] is not None:
            self._is_end[blocks[-1]] = True

    def clear_index(self) -> None:
        super().clear_index()
        self._kinds[:] = bytes(self.num_blocks)
        self._is_end[:] = bytes(self.num_blocks)

    def _come_back(self, block: int, key: bytes) -> None:
        kind = _FRESH if key in self._gone[_FRESH] else _CONTINUED
        self._is_end[block] = self._gone[kind].pop(key)
        self._kinds[block] = _CONTINUED
        self._learn(kind)

    def _learn(self, kind: int) -> None:
        """Keep blocks of this kind longer, since one was reused too early."""
        step = _GAIN / (2 * len(self._gone[kind]) + self.num_blocks / 32)  # the share of them counts that comes back
        order = self._order
        if kind == _FRESH:
            order.log_weight = max(order.log_weight - _DOUBT * step, 0.0)
        else:
            order.log_weight = min(order.log_weight + step, _MAX_LOG_WEIGHT)

    def _remove(self, block: int, key: bytes) -> None:
        super()._remove(block, key)
        self._kinds[block] = _FRESH
        self._is_end[block] = False

    def check_invariants(self, tables: Iterable[Iterable[int]]) -> None:
        super().check_invariants(tables)
        assert not any(
            self._kinds[block] or self._is_end[block] for block in self._ids() if self._key_by_block[block] is None
        )

    def _report_evicted(self, block: int, *, is_demoted: bool) -> None:
        key = self._key_by_block[block]
        assert key is not None, "a block without content is empty"
        self._gone[self._kinds[block]][key] = bool(self._is_end[block])
        if sum(map(len, self._gone)) > self.num_blocks:
            max(self._gone, key=len).popitem(last=False)
        super()._report_evicted(block, is_demoted=is_demoted)
