"""KVCacheManager: the blocks of each request, and the blocks that requests share.

Between scheduler and pool: converts token counts to blocks, computes the chain of keys and caches full blocks. Knows no
rows and no steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

from ...ipc.messages.media import MediaSpan
from ..media_spans import event_extra, key_extra
from ..request import BlockTable, Request
from .block_hash import block_key, block_keys, random_namespace, shared_root
from .block_pool import BlockObserver, BlockPool
from .block_record import BlockRecord
from .computed import Computed, find_computed
from .events import BlockContent, KVEvents
from .hit_rule import Hit, longest_hit
from .kv_sizes import KVSizes
from .outer_blocks import OuterBlocks
from .session_pool import SessionPool
from .slab_pool import SlabPool
from .slabs import Memory, Slabs, WholePool
from .state_table import StateTable
from .tables import FullTable, WindowTable


class KVCacheManager:
    """Owner of the pools of all KV groups. A request's block tables, one for each group, are `request.tables`."""

    def __init__(self, sizes: KVSizes, enable_prefix_caching: bool, record: BlockRecord | None = None) -> None:
        """record: the file with the keys of the blocks, from the previous core and for the next."""
        shape = sizes.shape
        self.sizes = sizes
        self.groups = sizes.groups
        self.block_size = sizes.block_size
        self.is_of_step = sizes.is_of_step
        observers: list[BlockObserver] = [] if record is None else [record]
        keys = [{} if record is None else record.key_by_block(group) for group in range(len(self.groups))]
        self.pools: Sequence[BlockPool]
        self.memory: Memory
        if len(self.groups) == 1:
            self.pools = [SessionPool(shape.num_blocks(), observers, keys[0])]
            self.memory = WholePool(self.pools[0], shape.block_bytes[0])
        else:
            self.pools = pools = [SlabPool(shape, observers, group) for group in range(len(self.groups))]
            self.memory = Slabs(shape, pools, sizes.floors, keys)
        self.pool = self.pools[0]
        self.take_pending = self.memory.take_pending
        self.mark_written = self.memory.mark_written
        self.sample = self.memory.sample
        self._most_needed = [group.most_needed(self.block_size) for group in self.groups]
        self.outer: OuterBlocks | None = None
        self.filling: Request | None = None  # the request that blocks are allocated for
        self._events: KVEvents | None = None
        self._is_caching = enable_prefix_caching
        self._record = record
        self._namespace = random_namespace() if record is None else record.namespace
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_unusable_tokens = [0] * len(self.groups)
        self.num_snapshots = Counter[str]()  # by the reason, see StateTable.release

    def attach_outer(self, outer: OuterBlocks) -> None:
        """Move blocks to places outside the pools and back from now on."""
        self.outer = outer
        for pool in self.pools:
            pool.add_observer(outer)

    def attach_events(self) -> KVEvents:
        """Return a new collector of events about the blocks in the pool of group 0, and in the slots of outer places
        that are already attached."""
        self._events = KVEvents(self.block_size, self.pool.keys)
        self.pool.add_observer(self._events)
        if self.outer is not None:
            self.outer.slots.add_observer(self._events.watch_slots(self.outer.slots.keys))
        return self._events

    @property
    def num_usable_blocks(self) -> int:
        """The number of blocks of group 0 that the memory has room for."""
        return self.sizes.shape.num_usable

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks of group 0 that the free memory has room for."""
        return self.memory.num_free_bytes // self.sizes.shape.block_bytes[0]

    def num_readable_blocks(self, request: Request) -> int:
        """Return how many of the request's first blocks may be read from a cache.

        They end before the last token, which must be computed to sample the next, and before prompt tokens whose
        logprobs are requested and not delivered yet. Pooling that needs all hidden states reads no blocks. A
        request that skips the cache reads only blocks of its own prompt group."""
        if request.pooling is not None and request.pooling.needs_all_states:
            return 0
        if self.is_of_step or (request.params.skip_reading_prefix_cache and request.cache_root is None):
            return 0
        return (min(request.num_tokens, request.num_prompt_logprobs) - 1) // self.block_size

    def get_computed_blocks(self, request: Request) -> Computed:
        """Return the blocks of the request's longest prefix with which all groups can continue."""
        key = partial(self.key, request)
        find_outside = None if self.outer is None else self.outer.slots.lookup
        return find_computed(self.num_readable_blocks(request), self._most_needed, key, self.pools, find_outside)

    def longest_hit(self, key: Callable[[int], bytes], num_blocks: int) -> Hit:
        """Return the longest prefix, of at most `num_blocks` blocks, with which all groups can continue. key: returns
        the key of a block of the prompt."""
        return longest_hit(num_blocks, self._most_needed, lambda group, i: self.has(group, key(i)))

    def has(self, group: int, key: bytes) -> bool:
        """Return whether a block is in the pool or in an outer place that is as near."""
        is_in_pool = self.pools[group].lookup(key) is not None
        return is_in_pool or (self.outer is not None and self.outer.slots.lookup(key, group) is not None)

    def needed(self, end: int) -> list[range]:
        """Return the indexes of the blocks that each group needs at boundary `end`, in blocks."""
        return [range(end - group.num_needed(end, self.block_size), end) for group in self.groups]

    def num_missing(
        self, request: Request, computed: Computed, num_reserved: int, victims: Sequence[Request] = ()
    ) -> int:
        """Return how many slabs (blocks, if there is one group) the memory lacks to hold all known tokens of the
        request and leave others the blocks that `num_reserved` rows may need; 0 or less if they fit. computed: the
        result of get_computed_blocks. victims: running requests that would release their blocks before."""
        held = self.sizes.held(request.num_tokens)
        counts = self.sizes.reserve(num_reserved)
        for group, (most, blocks) in enumerate(zip(held, computed.blocks, strict=True)):
            counts[group] += max(most - len(blocks), 0)
        taken = list[list[int]]()
        released = list[list[int]]()
        for group, (pool, blocks) in enumerate(zip(self.pools, computed.blocks, strict=True)):
            taken.append([block for block in blocks if not pool.ref_count(block)])
            owned = Counter(chain.from_iterable(victim.tables[group].held for victim in victims))
            for block in blocks:
                owned.pop(block, None)
            released.append([block for block, count in owned.items() if count == pool.ref_count(block)])
        return self.memory.num_missing(counts, released, taken)

    def has_room(self, num_rows: int) -> bool:
        """Return whether each group has the blocks that so many rows may need in a step."""
        return self.memory.num_missing(self.sizes.reserve(num_rows)) <= 0

    def num_spare(self, most: int, num_reserved: int) -> int:
        """Return how many blocks, at most `most`, each group has room for next to those of `num_reserved` rows."""
        return next((count for count in range(most, 0, -1) if self.has_room(count + num_reserved)), 0)

    def prompt_keys(self, token_ids: bytes, salt: str | None, adapter: bytes, media: list[MediaSpan]) -> list[bytes]:
        """Return the keys of a prompt's full blocks, followed by their root. token_ids: int32. adapter: the adapter's
        digest, or empty."""
        root = shared_root(self._namespace, salt, adapter)
        return [*block_keys(root, token_ids, self.block_size, media), root]

    def take_computed(self, request: Request, computed: Computed, *, has_rows: bool = False) -> bool:
        """Start the request's tables with `computed`, the result of get_computed_blocks; reference its blocks, count
        them as hits and return True.

        Return False if the blocks to load from outer places are more than one step may load next to running rows
        (has_rows): then the request must wait for the next step."""
        assert not request.tables, "a request starts without tables"
        self.memory.advance()
        blocks = computed.blocks
        if request.num_cached_tokens < 0:  # its first admission: later it finds its own
            request.num_found_blocks = computed.num_blocks
            self.pool.note_needed(blocks[0])
        if self.outer is None:
            for pool, each in zip(self.pools, blocks, strict=True):
                pool.touch(each)
        else:
            found = self.outer.take(request, computed, has_rows=has_rows)
            if found is None:
                return False
            blocks = found
        deepest = computed.deepest
        if self.outer is not None:
            deepest = max(deepest, self.outer.deepest(request))
        kept = self._kept_boundaries(request, computed.num_blocks, deepest)
        request.tables = [self._new_table(request, group, kept) for group in range(len(self.groups))]
        for table, each in zip(request.tables, blocks, strict=True):
            table.take(computed.num_blocks, each)
        request.num_cached_blocks = request.num_blocks
        if self._events is not None:
            self._describe(request, 0, request.num_cached_blocks)
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += request.num_blocks * self.block_size
        for group, count in enumerate(computed.num_unusable):
            self.num_unusable_tokens[group] += count * self.block_size
        return True

    def _new_table(self, request: Request, group: int, kept: Sequence[int]) -> BlockTable:
        if self.groups[group].is_state:
            return StateTable(self.pools[group], self.block_size, kept, is_sharing=self.shares_blocks(request))
        window = self.groups[group].window
        if window is None:
            return FullTable(self.pools[group])
        return WindowTable(self.pools[group], window, self.block_size, kept)

    def _kept_boundaries(self, request: Request, start: int, deepest: int) -> Sequence[int]:
        """Return the boundaries, in blocks, at which other requests are likely to begin: the last of the prompt, that
        of the hit, the one that keys of the first group reached, and some others of the prompt."""
        if self.sizes.are_full:
            return ()
        last = (request.num_prompt_tokens - 1) // self.block_size
        spacing = self.sizes.spacing
        return sorted({start, deepest, last, *range(spacing, last, spacing)})

    def cache_blocks(self, request: Request, num_blocks: int) -> None:
        """Let other requests find the first `num_blocks` blocks of this one. If the request has a `cache_root`, only
        its own prompt group finds them; without that and without prefix caching, nobody does.

        All their tokens must be known, and the steps that write them must have been sent or be the next to send.
        `num_blocks` must not decrease from call to call."""
        if self._is_caching or self.shares_blocks(request):  # the first saves a call in most steps
            is_private = request.cache_root is not None
            if self._events is not None:
                self._describe(request, request.num_cached_blocks, num_blocks)
            start = request.num_cached_blocks
            keys = request.block_keys
            if len(keys) < num_blocks:
                self._add_keys(request, num_blocks)
            for table in request.tables:
                for i in range(start, num_blocks):
                    if block := table.block_ids[i]:  # not the null block
                        table.cache_block(block, keys[i], is_private=is_private)
            if self.outer is not None and not is_private:
                for group, table in enumerate(request.tables):
                    blocks = [
                        (block, keys[i], table.is_kept(i))
                        for i in range(start, num_blocks)
                        if (block := table.block_ids[i])
                    ]
                    self.outer.sent(group, blocks, request.params.cache_salt)
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
        """Free the request's blocks; full ones stay findable until they are reused."""
        self.memory.advance()
        if self.outer is not None and request.cache_root is None:
            self._keep_end(request)
        self.pool.note_end(request.tables[0].block_ids[: request.num_cached_blocks], request.num_found_blocks)
        for table in request.tables:
            table.free()
        request.tables = []
        request.num_cached_blocks = 0

    def _keep_end(self, request: Request) -> None:
        """Tell the outer places that other requests are likely to continue where this one ends."""
        end = request.num_cached_blocks
        assert self.outer is not None
        for group, needed in enumerate(self.needed(end)):
            keys, pool = request.block_keys[needed.start : end], self.pools[group]
            if not self.groups[group].is_full and all(pool.lookup(key) is not None for key in keys):
                self.outer.keep(group, keys)

    def forget_all(self) -> None:
        """Remove all keys from the indexes. Blocks keep their content for the requests that reference them."""
        for pool in self.pools:
            pool.forget_all()

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
        assert self.is_idle, "a request still holds blocks"
        for pool in self.pools:
            pool.clear_index()
        self.memory.reset()

    @property
    def is_idle(self) -> bool:
        """Whether no request holds blocks."""
        return self.num_free_blocks == self.num_usable_blocks

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
        if len(request.block_keys) <= i:
            self._add_keys(request, i + 1)
        return request.block_keys[i]

    def _add_keys(self, request: Request, end: int) -> None:
        """Compute the keys of the request's first `end` blocks that are not known yet."""
        keys, size, media, tokens = request.block_keys, self.block_size, request.media, request.tokens
        parent = keys[-1] if keys else self._root(request)
        for first in range(len(keys) * size, end * size, size):
            extra = key_extra(media, first, first + size) if media else b""
            parent = block_key(parent, tokens[first : first + size].tobytes(), extra)
            keys.append(parent)

    def _root(self, request: Request) -> bytes:
        if request.cache_root is not None:
            return request.cache_root
        adapter = b"" if request.adapter is None else request.adapter.digest
        return shared_root(self._namespace, request.params.cache_salt, adapter)

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self, first_by_request: Mapping[Request, int]) -> None:
        """Raise AssertionError unless pools and tables agree, and the tables have the blocks that running requests
        read. These may compute their tokens from the given ones on."""
        self.memory.check_invariants()
        assert not (self.is_of_step and any(each.num_blocks for each in first_by_request)), "no block outlives a step"
        for group, pool in zip(self.groups, self.pools, strict=True):
            tables = [request.tables[pool.group] for request in first_by_request]
            pool.check_invariants([table.held for table in tables])
            if group.is_state:  # see StateMoves.check_invariants
                assert all(
                    len(request.tables[pool.group].block_ids) == request.num_blocks for request in first_by_request
                )
                continue
            for table, (request, first) in zip(tables, first_by_request.items(), strict=True):
                num_left = len(table.block_ids) - len(table.held)
                seen_from = first + 1 if group.window is None else first - group.window + 1
                assert len(table.block_ids) == request.num_blocks, "tables of different lengths"
                assert not num_left or num_left * self.block_size <= seen_from, "a block is missing that is read"
                assert not any(table.block_ids[:num_left]) and (group.window or not num_left)
