"""KVCacheManager: the blocks of each request, and the blocks that requests share.

Between scheduler and pool: converts token counts to blocks, computes the chain of keys and caches full blocks. Knows no
rows and no steps.
"""

from __future__ import annotations

from ...ipc.messages.media import MediaSpan
from ..media_spans import event_extra, key_extra
from ..request import Request
from .block_hash import block_key, block_keys, random_namespace, shared_root
from .block_pool import BlockObserver, BlockPool
from .block_record import BlockRecord
from .events import BlockContent, KVEvents
from .outer_blocks import POOL, OuterBlocks


class KVCacheManager:
    """Owner of the pool. A request's block table is `request.block_ids`; block i holds its tokens [i·size,
    (i+1)·size)."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, record: BlockRecord | None = None
    ) -> None:
        """record: the file with the keys of the blocks, from the previous core and for the next."""
        observers: list[BlockObserver] = [] if record is None else [record]
        self.pool = BlockPool(num_blocks, observers, None if record is None else record.key_by_block)
        self.outer: OuterBlocks | None = None
        self._events: KVEvents | None = None
        self.block_size = block_size
        self._is_caching = enable_prefix_caching
        self._record = record
        self._namespace = random_namespace() if record is None else record.namespace
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def attach_outer(self, outer: OuterBlocks) -> None:
        """Move blocks to places outside the pool and back from now on."""
        self.outer = outer
        self.pool.add_observer(outer)

    def attach_events(self) -> KVEvents:
        """Return a new collector of events about the blocks in the pool, and in the slots of outer places that are
        already attached."""
        self._events = KVEvents(self.block_size, self.pool.keys)
        self.pool.add_observer(self._events)
        if self.outer is not None:
            self.outer.slots.add_observer(self._events.watch_slots(self.outer.slots.keys))
        return self._events

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_blocks - 1

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_readable_blocks(self, request: Request) -> int:
        """Return how many of the request's first blocks may be read from a cache.

        They end before the last token, which must be computed to sample the next, and before prompt tokens whose
        logprobs are requested and not delivered yet. Mean pooling needs all hidden states and reads no blocks. A
        request that skips the cache reads only blocks of its own prompt group."""
        if request.pooling is not None and request.pooling.method == "mean":
            return 0
        if request.params.skip_reading_prefix_cache and request.cache_root is None:
            return 0
        return (min(request.num_tokens, request.num_prompt_logprobs) - 1) // self.block_size

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Return the blocks of the request's longest prefix that is in the pool."""
        blocks = []
        for i in range(self.num_readable_blocks(request)):
            block = self.pool.lookup(self.key(request, i))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_missing(self, request: Request, computed: list[int], num_reserved: int) -> int:
        """Return how many blocks the pool lacks to hold all known tokens of the request and leave `num_reserved` blocks
        for others; 0 or less if they fit. computed: the result of get_computed_blocks."""
        num_idle_hits = sum(not self.pool.ref_count(block) for block in computed)
        num_new = self.num_blocks_for(request.num_tokens) - len(computed)
        return num_new + num_idle_hits + num_reserved - self.pool.num_free

    def num_freed_by(self, request: Request, kept: list[int]) -> int:
        """Return how many blocks would become free if `request` released its blocks, not counting those in `kept`."""
        return sum(self.pool.ref_count(block) == 1 for block in set(request.block_ids).difference(kept))

    def prompt_keys(self, token_ids: bytes, salt: str | None, adapter: bytes, media: list[MediaSpan]) -> list[bytes]:
        """Return the keys of a prompt's full blocks, followed by their root. token_ids: int32. adapter: the adapter's
        digest, or empty."""
        root = shared_root(self._namespace, salt, self.pool.group, adapter)
        return [*block_keys(root, token_ids, self.block_size, media), root]

    def take_computed(self, request: Request, computed: list[int], *, has_rows: bool = False) -> bool:
        """Start the request's table with `computed`, the result of get_computed_blocks, and the blocks that follow them
        in slots and in the pool; reference them, count them as hits and return True.

        Return False if the slots to load are more than one step may load next to running rows (has_rows): then the
        request must wait for the next step."""
        assert not request.block_ids, "a request starts with an empty table"
        self.pool.touch(computed)
        request.block_ids = computed
        if self.outer is not None:
            limit = self.num_readable_blocks(request)
            more = self.outer.load_prefix(request, len(computed), limit, has_rows=has_rows)
            if more is None:
                self.free(request)
                return False
            self.outer.count_hits(request, [*((block, POOL) for block in computed), *more])
            request.block_ids = computed + [block for block, _ in more]
        request.num_cached_blocks = len(request.block_ids)
        if self._events is not None:
            self._describe(request, 0, request.num_cached_blocks)
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += len(request.block_ids) * self.block_size
        return True

    def allocate_slots(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the table to hold `num_tokens` tokens, and return the new blocks; None if too few blocks are free."""
        num_new = -(-num_tokens // self.block_size) - len(request.block_ids)
        blocks = self.pool.allocate(num_new)
        request.block_ids += blocks or ()
        return blocks

    def cache_blocks(self, request: Request, num_blocks: int) -> None:
        """Let other requests find the first `num_blocks` blocks of this one. If the request has a `cache_root`, only
        its own prompt group finds them; without that and without prefix caching, nobody does.

        All their tokens must be known, and the steps that write them must have been sent or be the next to send.
        `num_blocks` must not decrease from call to call."""
        if self._is_caching or self.shares_blocks(request):  # the first saves a call in most steps
            is_private = request.cache_root is not None
            if self._events is not None:
                self._describe(request, request.num_cached_blocks, num_blocks)
            for i in range(request.num_cached_blocks, num_blocks):
                self.pool.cache_block(request.block_ids[i], self.key(request, i), is_private=is_private)
            if self.outer is not None and not is_private:
                new = slice(request.num_cached_blocks, num_blocks)
                blocks = zip(request.block_ids[new], request.block_keys[new], strict=True)
                self.outer.sent(blocks, request.params.cache_salt)
        request.num_cached_blocks = num_blocks

    def _describe(self, request: Request, start: int, end: int) -> None:
        """Give the content of blocks [start, end) of the request's table to the events."""
        if self._events is not None and request.cache_root is None:
            for i in range(start, end):
                parent = self.key(request, i - 1) if i else None
                first, last = i * self.block_size, (i + 1) * self.block_size
                tokens = request.tokens[first:last].tobytes()
                adapter = None if request.adapter is None else request.adapter.digest.hex()
                media = event_extra(request.media, first, last)
                content = BlockContent(parent, tokens, request.params.cache_salt, adapter, media)
                self._events.describe(self.key(request, i), content)

    def shares_blocks(self, request: Request) -> bool:
        """Return whether other requests, or at least the other answers of this request, can find its blocks."""
        return self._is_caching or request.cache_root is not None

    def free(self, request: Request) -> None:
        """Free the request's blocks from last to first, so that a prefix is evicted from its end."""
        self.pool.free(reversed(request.block_ids))
        request.block_ids = []
        request.num_cached_blocks = 0

    @property
    def namespace(self) -> bytes:
        """The namespace of the keys of all blocks that requests share."""
        return self._namespace

    def change_namespace(self, namespace: bytes | None = None) -> None:
        """Make everything cached so far impossible to find. The new namespace is random unless it is given. Running
        requests keep their keys and blocks."""
        self._namespace = namespace or random_namespace()
        if self._record is not None:
            self._record.change_namespace(self._namespace)
        if self._events is not None:
            self._events.change_namespace()

    def reset(self) -> None:
        """Evict all content. All block tables must be empty."""
        assert self.pool.num_free == self.num_usable_blocks, "a request still holds blocks"
        self.pool.clear_index()

    def begin_generation(self, generation: int) -> None:
        """Record that the blocks belong to a new worker group. Call it after `reset`, when the old workers have
        ended."""
        if self._record is not None:
            self._record.begin_generation(generation)

    def key(self, request: Request, i: int) -> bytes:
        """Return the key of the request's block i; for i = -1, the root. The keys up to i are computed once and
        kept."""
        if i < 0:
            return self._root(request)
        keys, size = request.block_keys, self.block_size
        for number in range(len(keys), i + 1):
            parent, first, last = keys[-1] if keys else self._root(request), number * size, (number + 1) * size
            extra = key_extra(request.media, first, last) if request.media else b""
            keys.append(block_key(parent, request.tokens[first:last].tobytes(), extra))
        return keys[i]

    def _root(self, request: Request) -> bytes:
        if request.cache_root is not None:
            return request.cache_root
        adapter = b"" if request.adapter is None else request.adapter.digest
        return shared_root(self._namespace, request.params.cache_salt, self.pool.group, adapter)
