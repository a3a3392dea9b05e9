"""Offload: KV blocks outside the pool. It decides which blocks go to slots, disk and remote store, and which come back.

Copies between pool and slots are part of the steps (copy_plan.py); the tier process moves blocks between slots and
disk, remote store and peers (fetches.py, write_behind.py). Offload connects both with the pool. With a host tier, a
block that the pool evicts is stored in a slot; a slot that is found at an admission is loaded.

Knows no sockets, and no steps: tier_feature.py takes part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ....ipc.messages.media import MediaSpan
from ....ipc.messages.tier import (
    STORE_ON_DISK,
    STORE_REMOTELY,
    BlocksFound,
    BlocksLoaded,
    BlocksStored,
    PinBlocks,
    SourceState,
    TierCleared,
    TierOpened,
    TierState,
    TierToCore,
    UnpinSlots,
)
from ...kv.manager import KVCacheManager
from ...kv.outer_blocks import POOL
from ...request import Request, WaitReason
from ...scheduling.step.step_copies import StepCopies
from .copy_plan import CopyPlan
from .costs import ComputeCost
from .fetch import MissingBlocks
from .fetches import Fetches
from .hits import HOST
from .opening import Opening
from .options import Tiers
from .peer_pins import PeerPins
from .slots import Slots, owner_of
from .write_behind import WriteBehind

COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # most that a step with running rows loads: about 10 ms


class Offload:
    """Owner of the slots, and observer of the pool, which reports written and evicted blocks to it."""

    def __init__(
        self,
        tiers: Tiers,
        kv_cache: KVCacheManager,
        release: Callable[[Request, WaitReason], None],
        change_namespace: Callable[[bytes], None],
    ) -> None:
        """release: lets a request run. change_namespace: called with the namespace of the weights."""
        options, send, record, self.clock = tiers
        observers, names = [] if record is None else [record], None
        if record is not None:
            names = [record.key_by_block(group) for group in range(options.arena.num_groups)]
        self._record, pool = record, kv_cache.pool
        self.slots = Slots(options.arena, observers, names, options.quota)
        self.plan = CopyPlan(self.slots)
        self.compute = ComputeCost(options.token_s)
        self.writes = WriteBehind(pool, self.slots, self.plan, is_host_tier=options.is_host_tier)
        self.writes.writes_salted_remotely = options.writes_salted_remotely
        self.fetches = Fetches(pool, self.slots, self.compute, options.block_size, send, self._let_run)
        self.fetches.reads_salted_remotely = options.writes_salted_remotely
        self.hits = self.fetches.hits
        self.fetches.on_found_keys = self._note_kept
        self.sources: list[SourceState] = []
        self.num_stored = self.num_loaded = 0  # blocks, between pool and slots
        self.stored_bytes = self.loaded_bytes = 0
        self._options, self._kv_cache, self._pool, self._send = options, kv_cache, pool, send
        self._arriving: set[int] = set()  # blocks that get their content from a slot
        self._is_sent: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.zeros(pool.num_blocks, np.bool_)
        self._owner_by_block: dict[int, int] = {}  # tenant, for blocks of requests with a salt
        self._max_loads = max(COPY_BYTES[options.device] // options.arena.slot_bytes[0], 1)
        self._release, self._change_namespace = release, change_namespace
        self._opening = Opening(options.facts, send, self._on_open)
        self._pins = PeerPins(self.slots)

    # ── the tier process ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_open(self) -> bool:
        """Whether blocks can be loaded from sources and written to them: the namespace of the weights is known."""
        return self._opening.is_open

    def open(self, model_folder: str) -> None:
        """Start to use the tier process, for the weights in `model_folder`. A host tier alone needs no process."""
        if self._options.uses_process:
            self._opening.ask(model_folder)

    def close(self) -> None:
        """Begin no load from a source and queue no write until `open` is answered: the weights are about to change.
        Loads and writes that are under way go on."""
        self._opening.close()
        self.writes.targets = 0
        self.writes.forget()

    def on_tier_lost(self) -> None:
        """Take back the slots of the tier process, which has ended, and send no orders until `open`. Copies between the
        pool and slots go on."""
        self.close()
        self.writes.on_tier_lost()
        self.fetches.on_tier_lost()
        self._pins.clear()
        self._opening.on_lost()
        self.sources = []

    def on_message(self, message: TierToCore) -> None:
        now = self.clock()
        if isinstance(message, BlocksFound):
            self.fetches.on_found(message, now)
        elif isinstance(message, BlocksLoaded):
            self.fetches.on_loaded(message, now)
        elif isinstance(message, BlocksStored):
            self.writes.on_stored(message)
        elif isinstance(message, TierOpened):
            self._opening.on_opened(message)
        elif isinstance(message, TierState):
            self.sources = message.sources
        elif isinstance(message, PinBlocks):
            self._send(self._pins.pin(message))
        elif isinstance(message, UnpinSlots):
            self._pins.unpin(message.slots)
        elif isinstance(message, TierCleared):
            self._opening.on_cleared(message.serial)

    def _on_open(self, namespace: bytes) -> None:
        self._change_namespace(namespace)
        self.writes.targets = self._options.sources

    def clear(self, done: Callable[[], None]) -> None:
        """Remove all blocks of these weights from the slots, the disk and the remote store; then call `done`. If the
        tiers are closed, call it at once: their blocks cannot be found, and are removed before the tiers open."""
        self.fetches.void()
        self.slots.forget_all()
        self.writes.forget()
        self._opening.clear(done)

    def lose_slots(self, arena: int) -> None:
        """Forget the content of all slots: a host that had a part of each was lost. arena: number of the new arena."""
        self.fetches.void()
        self.slots.forget_all()
        self.writes.forget()
        if self._record is not None:
            self._record.begin_generation(arena)

    # ── the pool's content ───────────────────────────────────────────────────────────────────────────────────────

    def written(self, group: int, block: int, key: bytes) -> None:
        is_computed = block not in self._arriving
        self._arriving.discard(block)
        self.writes.see(block, key, self._owner_by_block.get(block, 0), is_computed=is_computed)

    def sent(self, blocks: Iterable[tuple[int, bytes]], salt: str | None = None) -> None:
        """Record that these blocks are written by a step that was sent or is sent next: later steps may copy them.
        salt: cache salt of the request that fills them."""
        owner = owner_of(salt)
        for block, key in blocks:
            self._is_sent[block] = self._pool.holds(block, key)
            if owner:
                self._owner_by_block[block] = owner

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        """Plan the copy of an evicted block to a slot, before the next step overwrites it: with a host tier, or if the
        block is queued for a write; only if a sent step has written it, no slot has it, and a slot is free."""
        is_sent, owner = self._is_sent[block], self._owner_by_block.get(block, 0)
        self.hits.forget(key)
        self.forgotten(group, block, key)
        if (slot := self.slots.lookup(key)) is not None:
            self.slots.touch([slot])  # used as lately as the block
            self.slots.free([slot])
        elif is_sent and (self._options.is_host_tier or self.writes.is_queued(key)):
            slot = self.plan.store(block, key, owner)
            if slot is not None:
                self.num_stored += 1
                self.stored_bytes += self.slots.bytes_of(slot)

    def forgotten(self, group: int, block: int, key: bytes) -> None:
        self._is_sent[block] = False
        self._arriving.discard(block)
        self._owner_by_block.pop(block, None)

    def cleared(self, group: int) -> None:
        self._is_sent[:] = False
        self._arriving.clear()
        self._owner_by_block.clear()

    def _note_kept(self, keys: Iterable[bytes], source: int) -> None:
        targets = (STORE_ON_DISK, STORE_REMOTELY, 0)[source]
        if targets:
            self.writes.note_kept(keys, targets)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def find_missing(
        self, key: Callable[[int], bytes], num_blocks: int, tokens: bytes, media: list[MediaSpan], salt: str | None
    ) -> MissingBlocks | None:
        """Return a prompt's blocks from the first that is neither in the pool nor in a slot; None if all are, or if
        none can be loaded. key: returns the key of a block, for -1 the root of the keys. tokens: int32."""
        start = self._num_here(key, num_blocks)
        if start >= num_blocks or not self.is_open or not self._options.has_sources:
            return None
        size = self._options.block_size
        return MissingBlocks(
            start,
            parent=key(start - 1),
            tokens=tokens[4 * start * size : 4 * num_blocks * size],
            first_keys=lambda count: [key(start + i) for i in range(count)],
            media=media,
            owner=owner_of(salt),
        )

    def prefetch(
        self, tokens: bytes, salt: str | None, adapter: bytes, media: list[MediaSpan], done: Callable[[int], None]
    ) -> None:
        """Load blocks of a prompt into slots, then call `done` with the number of its first tokens that are in the pool
        or a slot. tokens: int32. adapter: digest, or empty."""
        keys = self._kv_cache.prompt_keys(tokens, salt, adapter, media)
        num_blocks = len(keys) - 1

        def end() -> None:
            done(self._num_here(keys.__getitem__, num_blocks) * self._kv_cache.block_size)

        missing = self.find_missing(keys.__getitem__, num_blocks, tokens, media, salt)
        if missing is None:
            end()
        else:
            self.fetches.prefetch(missing, self.clock(), on_end=end)

    def _num_here(self, key: Callable[[int], bytes], num_blocks: int) -> int:
        """Return how many blocks, from the first without a gap, are in the pool or a slot."""
        for i in range(num_blocks):
            if self._pool.lookup(key(i)) is None and self.slots.lookup(key(i)) is None:
                return i
        return num_blocks

    def _let_run(self, request: Request) -> None:
        self._release(request, WaitReason.TIER)

    def load_prefix(self, request: Request, start: int, end: int, *, has_rows: bool) -> list[tuple[int, int]] | None:
        """Load blocks [start, end) of a request from their slots in the next step, up to the first that is neither in a
        slot nor in the pool. Return (pool block, HOST or POOL) for each block in order, all referenced. None if there
        are too many for one step: then the first ones are copied to the pool, where a later call finds them.

        has_rows: other rows run, which limits the loads of a step. The request references its blocks before `start`,
        and the pool has room for all blocks of the request."""
        blocks: dict[bytes, int] = {}  # in the pool
        slots: dict[bytes, int] = {}
        for i in range(start, end):
            key = self._kv_cache.key(request, i)
            if (block := self._pool.lookup(key)) is not None:
                blocks[key] = block
            elif (slot := self.slots.lookup(key)) is not None:
                slots[key] = slot
            else:
                break
        # All that was found is referenced before a block is allocated: the allocation evicts the content of a free
        # block, which may be one found here, and stores it in a free slot, which may be one found here. The plan takes
        # its own reference to each slot until the step is done, so these end below.
        self._pool.touch(blocks.values())
        self.slots.touch(slots.values())
        try:
            limit = self.max_loads(has_rows=has_rows)
            if len(slots) > limit:
                self.land_slots(list(slots.items())[:limit])
                self._pool.free(reversed(blocks.values()))
                return None
            new = self._pool.allocate(len(slots)) or []
            for block, (key, slot) in zip(new, slots.items(), strict=True):
                self._copy_back(slot, block, key)
                blocks[key] = block
        finally:
            self.slots.free(reversed(slots.values()))
        keys = (self._kv_cache.key(request, i) for i in range(start, start + len(blocks)))
        return [(blocks[key], HOST if key in slots else POOL) for key in keys]

    def _copy_back(self, slot: int, block: int, key: bytes) -> None:
        self.plan.load(slot, block)
        self._arriving.add(block)
        self._pool.cache_block(block, key)
        self.num_loaded += 1
        self.loaded_bytes += self.slots.bytes_of(slot)

    def count_hits(self, request: Request, found: Sequence[tuple[int, int]]) -> None:
        """Count the first blocks of an admitted request as hits, and queue writes of those found in the pool that are
        due. found: (pool block, place) of each; place: POOL or HOST."""
        for i, (block, place) in enumerate(found):
            key = self._kv_cache.key(request, i)
            self.hits.count(request, key, place)
            if place == POOL and self.writes.targets and self._is_sent[block]:
                self.writes.see(block, key, self._owner_by_block.get(block, 0), is_computed=False)

    def hit_shares(self, num_queried: int) -> str:
        """Return the shares of `num_queried` tokens that came from each place, as text for the log line."""
        return self.hits.shares(num_queried)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def max_loads(self, *, has_rows: bool) -> int:
        """Return how many blocks may be loaded in one step; has_rows: rows run, and must not wait for long."""
        return self._max_loads if has_rows else self.slots.num_slots

    def land(self, num_rows: int) -> None:
        """Plan copies of loaded blocks to the pool, for requests that need more slots than there are, so that their
        slots become free. num_rows: number of running rows; as many free blocks of the pool are left to them."""
        for fetch in self.fetches.stalled():
            held = self.fetches.held_keys(fetch)
            void = [key for key in held if not self.slots.holds(fetch.held[key], key)]  # a lost step did not fill them
            self.fetches.let_go(fetch, void)
            room = min(self._pool.num_free - num_rows, self.max_loads(has_rows=num_rows > 0))
            landed = [key for key in held if key in fetch.held][: max(room, 0)]
            self.land_slots([(key, fetch.held[key]) for key in landed])
            self.fetches.let_go(fetch, landed)

    def land_slots(self, found: list[tuple[bytes, int]]) -> None:
        """Plan copies of slots into free blocks of the pool, where they can be found by their keys. The pool must have
        len(found) free blocks. found: (key, slot) of each."""
        blocks = self._pool.allocate(len(found)) or []
        for block, (key, slot) in zip(blocks, found, strict=True):
            self._copy_back(slot, block, key)
            self.hits.note_origin(key, HOST)
        self._pool.free(reversed(blocks))

    def on_workers_ended(self) -> None:
        """Release the slots of lost steps: the workers that ran them have ended and no longer copy."""
        self.plan.release_lost()

    def tick(self, *, is_idle: bool) -> None:
        """Send the orders that are due, and end waits that are too long; is_idle: no row decodes."""
        now = self.clock()
        self.fetches.tick(now)
        if self._opening.has_process and (order := self.writes.take(now, is_idle=is_idle)) is not None:
            self._send(order)

    @property
    def next_deadline(self) -> float | None:
        """Time at which to call `tick` next, in monotonic seconds; None: nothing is due."""
        deadlines = (self.fetches.next_deadline, self.writes.next_deadline)
        return min((each for each in deadlines if each is not None), default=None)

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self, steps: Iterable[StepCopies | None]) -> None:
        """Raise AssertionError unless the slots are referenced exactly by steps, loads, writes, fetches and peers."""
        tables = list(self._pins.references())
        for copies in steps:
            if copies is not None:
                tables += [*copies.slots, *(write.slot for write in copies.writes)]
        self.slots.check_invariants(
            [tables, self.plan.references(), self.fetches.references(), self.writes.references()]
        )
