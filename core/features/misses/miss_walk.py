"""MissWalk: finds out, block by block, why a prompt's blocks were not in the prefix cache.

    0 ──────── found ──────── index ───────────────── num_blocks
      in the cache    explained     as the steps compute them

A block is looked at when a step is made that computes it, so that a long prompt costs little at a time, and no key is
computed that would not be computed anyway. The walk ends at the first block that no request has computed before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ....ipc.messages.base import CacheMisses, MissReason
from ...kv.block_hash import block_key, block_keys
from ...kv.manager import KVCacheManager
from ...media_spans import key_extra
from ...request import Request
from .lost_blocks import LostBlocks
from .namespaces import Namespaces, mark_of, tenant_of


class MissWalk:
    """The walk over one prompt. `is_open` until a block is new or the last one is explained."""

    def __init__(
        self,
        request: Request,
        index: int,
        num_readable: int,
        kv_cache: KVCacheManager,
        lost: LostBlocks,
        namespaces: Namespaces,
    ) -> None:
        """index: of the first block that was not found. num_readable: blocks that the request may read from a cache."""
        self.request = request
        self.num_blocks = (request.num_prompt_tokens - 1) // kv_cache.block_size  # the last token is always computed
        self.is_open = True
        self._twins: Sequence[Request] = ()  # requests before it that compute the same blocks now
        self._kv_cache, self._lost, self._namespaces = kv_cache, lost, namespaces
        self._index, self._num_readable = index, num_readable
        self._size = kv_cache.block_size
        self._admitted_at = lost.clock()
        self._num_by_reason = Counter[MissReason]()
        self._reason: MissReason | None = None  # of the block before `index`
        self._evicted_s = 0.0
        self._other: tuple[MissReason, bytes] | None = None  # the namespace that has it, and the key there

    def explain(self, end: int, reason: MissReason) -> None:
        """Give the blocks up to `end` this reason."""
        if end > self._index:
            self._num_by_reason[reason] += (end - self._index) * self._size
            self._index, self._reason = end, reason

    def advance(self, end: int, in_step: Mapping[bytes, Sequence[Request]]) -> None:
        """Explain the blocks up to `end`, which a step is going to compute, or end the walk at a new block. in_step:
        requests admitted earlier that are in the same step, by the key of the first block that each computes in it."""
        end = min(end, self.num_blocks)
        while self.is_open and self._index < end:
            reason = self._reason_of_next(in_step)
            if reason is None:
                self.is_open = False
            else:
                self.explain(self._index + 1, reason)
        if self._index >= self.num_blocks:
            self.is_open = False

    def _reason_of_next(self, in_step: Mapping[bytes, Sequence[Request]]) -> MissReason | None:
        """Return why the next block was not found; None if it is new."""
        if self._other is not None:
            return self._reason_elsewhere(self._other)
        key = self._kv_cache.key(self.request, self._index)
        self._twins = in_step.get(key, self._twins)
        if self._twins and any(map(self._is_computed_by, self._twins)):
            return "concurrent"
        if self._kv_cache.has(0, key):
            if self._index >= self._num_readable:
                return "unread"
            return self._reason or "concurrent"  # it lies behind a block that is missing, or has come since
        loss = self._lost.find(key)
        if loss is None:
            return self._look_elsewhere()
        if loss.cause != "evicted":
            return loss.cause
        self._evicted_s = self._evicted_s or max(self._admitted_at - loss.at, 1e-6)
        is_own = loss.mark == mark_of(tenant_of(self.request))
        return "evicted" if is_own else "evicted_by_others"

    def _is_computed_by(self, twin: Request) -> bool:
        """Return whether another request, which has begun with the same blocks, has the next block, too."""
        index = self._index
        is_known = index < len(twin.block_keys) or (twin.row >= 0 and index < twin.num_prompt_tokens // self._size)
        return is_known and self._kv_cache.key(twin, index) == self.request.block_keys[index]

    def _tokens(self, start: int, end: int) -> bytes:
        return self.request.tokens[start * self._size : end * self._size].tobytes()

    def _was_computed(self, key: bytes) -> bool:
        return self._kv_cache.has(0, key) or self._lost.find(key) is not None

    def _look_elsewhere(self) -> MissReason | None:
        """Look for the next block, and all before it, in other namespaces of the tenant; return how the first that has
        them differs."""
        own, others = self._namespaces.visit(self.request, self._kv_cache.namespace)
        for other in others:
            key = other.root
            for key in block_keys(other.root, self._tokens(0, self._index + 1), self._size, self.request.media):
                if not self._was_computed(key):
                    break
            else:
                self._other = own.difference(other), key
                return self._other[0]
        return None

    def _reason_elsewhere(self, other: tuple[MissReason, bytes]) -> MissReason | None:
        """Return why the next block was not found, after one that another namespace has; None if it is new there,
        too. other: the difference, and the key of the block before."""
        reason, parent = other
        first = self._index * self._size
        extra = key_extra(self.request.media, first, first + self._size)
        key = block_key(parent, self._tokens(self._index, self._index + 1), extra)
        if not self._was_computed(key):
            return None
        self._other = reason, key
        return reason

    def report(self, forgets_before: float) -> CacheMisses:
        """Return the tokens by reason so far. forgets_before: time from which on all losses of blocks are known; 0:
        all."""
        return CacheMisses(
            num_tokens=dict(self._num_by_reason),
            evicted_s=round(self._evicted_s, 3),
            memory_s=round(max(self._admitted_at - forgets_before, 0.0), 3) if forgets_before else 0.0,
        )
