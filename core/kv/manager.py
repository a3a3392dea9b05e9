"""Which blocks a request has, and which of them others may read.

Between scheduler and pool: turns counts of tokens into blocks, walks the key chain, publishes full blocks. Knows no
rows and no steps.
"""

from __future__ import annotations

from ..request import Request
from .block_hash import block_key, random_namespace, salted_root
from .block_pool import BlockPool
from .block_record import BlockRecord


class KVCacheManager:
    """Owns the pool. A request's table is `request.block_ids`; block i holds its tokens [i·size, (i+1)·size)."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, record: BlockRecord | None = None
    ) -> None:
        """`record` tells what a core before this one left in the blocks, and keeps it for the next."""
        self.pool = BlockPool(num_blocks, record)
        self.block_size = block_size
        self._is_caching = enable_prefix_caching
        self._record = record
        self._namespace = random_namespace() if record is None else record.namespace
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_blocks - 1

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The longest chain of indexed blocks that begins the request's tokens, short of its last token: at least one
        token must be computed to sample the next, and each before a prompt token whose logprobs are wanted. A mean
        over all hidden states needs all of them; and a request may want to read none but its prompt_groups'."""
        if request.pooling is not None and request.pooling.method == "mean":
            return []
        if request.params.skip_reading_prefix_cache and request.cache_root is None:
            return []
        num_usable = min(request.num_tokens, request.num_prompt_logprobs) - 1
        blocks = []
        for i in range(num_usable // self.block_size):
            block = self.pool.lookup(self._key(request, i))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_missing(self, request: Request, computed: list[int], num_reserved: int) -> int:
        """Blocks that the pool lacks to hold all known tokens of the request beside `num_reserved` blocks for others;
        0 or less: it fits."""
        num_idle_hits = sum(not self.pool.is_referenced(block) for block in computed)
        num_new = self.num_blocks_for(request.num_tokens) - len(computed)
        return num_new + num_idle_hits + num_reserved - self.pool.num_free

    def num_freed_by(self, request: Request, kept: list[int]) -> int:
        """Blocks that become free with `request`, but for those in `kept`."""
        return sum(self.pool.is_exclusive(block) for block in set(request.block_ids).difference(kept))

    def take_computed(self, request: Request, computed: list[int]) -> None:
        """Start the request's table with the blocks found by get_computed_blocks."""
        assert not request.block_ids, "a request starts with an empty table"
        self.pool.touch(computed)
        request.block_ids = list(computed)
        request.num_cached_blocks = len(computed)
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += len(computed) * self.block_size

    def allocate_slots(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the table to hold `num_tokens` tokens; returns the new blocks, or None when too few are free."""
        num_new = -(-num_tokens // self.block_size) - len(request.block_ids)
        blocks = self.pool.allocate(num_new)
        request.block_ids += blocks or ()
        return blocks

    def cache_blocks(self, request: Request, num_blocks: int) -> None:
        """Index the first `num_blocks` blocks, which never get fewer: all their tokens are known and the steps that
        write them are sent."""
        if self._is_caching or request.cache_root is not None:
            for i in range(request.num_cached_blocks, num_blocks):
                self.pool.cache_block(request.block_ids[i], self._key(request, i))
        request.num_cached_blocks = num_blocks

    def free(self, request: Request) -> None:
        """Give back the request's blocks, tail first, so that a prefix is evicted from its end."""
        self.pool.free(reversed(request.block_ids))
        request.block_ids = []
        request.num_cached_blocks = 0

    def change_namespace(self) -> None:
        """From now on nothing that was cached before is found; keys made before are void but for who holds blocks."""
        self._namespace = random_namespace()
        if self._record is not None:
            self._record.change_namespace(self._namespace)

    def forget_idle(self) -> None:
        """Nothing that is cached now is found by a request that begins later. Tables stay as they are."""
        self.pool.drop_idle_keys()
        self.change_namespace()

    def reset(self) -> None:
        """Forget all cached content. Tables must be empty."""
        assert self.pool.num_free == self.num_usable_blocks, "a request still holds blocks"
        self.pool.clear_index()

    def begin_generation(self, generation: int) -> None:
        """The blocks are those of a new group of workers. `reset` came before."""
        if self._record is not None:
            self._record.begin_generation(generation)

    def _key(self, request: Request, i: int) -> bytes:
        """Key of the request's block i; earlier keys are made first and kept."""
        keys, size = request.block_keys, self.block_size
        for number in range(len(keys), i + 1):
            parent = keys[-1] if keys else self._root(request)
            keys.append(block_key(parent, request.tokens[number * size : (number + 1) * size].tobytes()))
        return keys[i]

    def _root(self, request: Request) -> bytes:
        if request.cache_root is not None:
            return request.cache_root
        salt = request.params.cache_salt
        return self._namespace if salt is None else salted_root(self._namespace, salt)
