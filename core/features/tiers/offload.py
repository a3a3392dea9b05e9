"""Offload: KV blocks outside the pool. It decides which blocks go to slots, disk and remote store, and which come back.

Copies between pool and slots are part of the steps (copy_plan.py); the tier process moves blocks between slots and
disk, remote store and peers (fetches.py, write_behind.py). Offload connects both with the pools of the KV groups. With
a host tier, a block that a pool evicts is stored in a slot, unless it was demoted; a slot that is found at an admission
is loaded.

Knows no sockets, and no steps: tier_feature.py takes part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ....ipc.messages.media import MediaSpan
from ....ipc.messages.tier import (
    STORE_ON_DISK,
    STORE_REMOTELY,
    BlocksFound,
    BlocksLoaded,
    BlocksStored,
    FindGroup,
    PinBlocks,
    SourceState,
    TierCleared,
    TierOpened,
    TierState,
    TierToCore,
    UnpinSlots,
)
from ...kv.block_hash import object_name
from ...kv.manager import KVCacheManager
from ...request import Request, WaitReason
from ...scheduling.step.step_copies import StepCopies
from .block_notes import BlockNotes
from .copy_plan import CopyPlan
from .costs import ComputeCost
from .fetch import MissingBlocks
from .fetches import Fetches
from .opening import Opening
from .options import Tiers
from .peer_pins import PeerPins
from .pool_loads import PoolLoads
from .slots import Slots, owner_of
from .write_behind import WriteBehind

COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # most that a step with running rows loads: about 10 ms


class Offload:
    """Owner of the slots, and observer of the pools, which report written and evicted blocks to it."""

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
        self._record, pools = record, kv_cache.pools
        self.slots = Slots(options.arena, observers, names, options.quota)
        self.plan = CopyPlan(self.slots)
        self.compute = ComputeCost(options.token_s)
        self.writes = WriteBehind(pools, self.slots, self.plan, is_host_tier=options.is_host_tier)
        self.writes.writes_salted_remotely = options.writes_salted_remotely
        self.fetches = Fetches(
            kv_cache.groups, pools, self.slots, self.compute, options.block_size, send, self._let_run
        )
        self.fetches.reads_salted_remotely = options.writes_salted_remotely
        self.hits = self.fetches.hits
        self.fetches.on_found_names = self._note_kept
        self.sources: list[SourceState] = []
        self.num_stored = self.stored_bytes = 0  # blocks that left the pool for slots, and their bytes
        self._options, self._kv_cache, self._pools, self._send = options, kv_cache, pools, send
        self._notes = [BlockNotes(pool) for pool in pools]
        max_bytes = COPY_BYTES[options.device]
        self.loads = PoolLoads(kv_cache, self.slots, self.plan, self._notes, self.writes, self.fetches, max_bytes)
        self.take = self.loads.take
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

    # ── the pools' content ───────────────────────────────────────────────────────────────────────────────────────

    def written(self, group: int, block: int, key: bytes) -> None:
        notes = self._notes[group]
        is_computed = block not in notes.arriving
        notes.arriving.discard(block)
        notes.is_written[block] = True
        if notes.is_wanted[block]:
            self.writes.see(group, block, key, notes.owner(block), is_computed=is_computed)

    def sent(self, group: int, blocks: Sequence[tuple[int, bytes, bool]], salt: str | None = None) -> None:
        """Record that blocks are written by a step that was sent or is sent next: later steps may copy them. blocks:
        (block, key, whether others are likely to need it). salt: cache salt of the request that fills them."""
        notes, owner = self._notes[group], owner_of(salt)
        for block, key, is_wanted in blocks:
            if notes.sent(block, key, owner):
                notes.is_wanted[block] = is_wanted
            elif is_wanted:  # another block has this content
                self.keep(group, [key])

    def sent_pending(self) -> None:
        """Record that the next step writes all blocks that were cached since the last one."""
        for notes in self._notes:
            notes.sent_pending()

    def keep(self, group: int, keys: Iterable[bytes]) -> None:
        notes = self._notes[group]
        for key in keys:
            block = self._pools[group].lookup(key)
            if block is not None and not notes.is_wanted[block]:
                notes.is_wanted[block] = True
                if notes.is_written[block]:
                    self.writes.see(group, block, key, notes.owner(block), is_computed=True)

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        """Plan the copy of an evicted block to a slot, before the next step overwrites it: with a host tier, if it was
        not demoted, or if the block is queued for a write; only if a sent step has written it, no slot has it, and a
        slot is free."""
        notes, name = self._notes[group], object_name(key, group)
        is_sent, owner = notes.is_sent[block], notes.owner(block)
        is_of_use = (self._options.is_host_tier and not is_demoted) or self.writes.is_queued(name)
        self.hits.forget(name)
        notes.forget(block)
        if (slot := self.slots.find(name)) is not None:
            self.slots.touch([slot])  # used as lately as the block
            self.slots.free([slot])
        elif is_sent and is_of_use:
            slot = self.plan.store(block, key, owner, group)
            if slot is not None:
                self.num_stored += 1
                self.stored_bytes += self.slots.bytes_of(slot)

    def forgotten(self, group: int, block: int, key: bytes) -> None:
        self._notes[group].forget(block)

    def cleared(self, group: int) -> None:
        self._notes[group].clear()

    def _note_kept(self, names: Iterable[bytes], source: int) -> None:
        targets = (STORE_ON_DISK, STORE_REMOTELY, 0)[source]
        if targets:
            self.writes.note_kept(names, targets)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def find_missing(
        self, key: Callable[[int], bytes], num_blocks: int, tokens: bytes, media: list[MediaSpan], salt: str | None
    ) -> MissingBlocks | None:
        """Return a prompt's blocks from the first that may be neither in the pool nor in a slot; None if all are there
        that it needs to continue after them, or if none can be loaded. key: returns the key of a block, for -1 the root
        of the keys. tokens: int32."""
        if not self.is_open or not self._options.has_sources:
            return None
        least = self._kv_cache.longest_hit(key, num_blocks).num_blocks
        if least >= num_blocks:
            return None
        firsts = [self._first_lacking(group, key, least, num_blocks) for group in range(len(self._pools))]
        start, size = min(firsts), self._options.block_size
        return MissingBlocks(
            start,
            parent=key(start - 1),
            tokens=tokens[4 * start * size : 4 * num_blocks * size],
            first_keys=lambda count: [key(start + i) for i in range(count)],
            media=media,
            owner=owner_of(salt),
            least=least,
            groups=[self._question(group, key, range(start, num_blocks), first) for group, first in enumerate(firsts)],
        )

    def _first_lacking(self, group: int, key: Callable[[int], bytes], least: int, end: int) -> int:
        """Return the index of the first block that a group may lack at a boundary beyond `least`, up to `end`."""
        if not self._kv_cache.groups[group].is_full:
            return least  # the blocks that are needed at `least` are here
        return next((i for i in range(least, end) if not self._kv_cache.has(group, key(i))), end)

    def _question(self, group: int, key: Callable[[int], bytes], blocks: range, first: int) -> FindGroup:
        """Return what a group needs, and which of these blocks are here; those before `first` are."""
        if len(self._pools) == 1 and self._kv_cache.groups[0].is_full:
            return FindGroup()
        has, most = self._kv_cache.has, self._kv_cache.groups[group].most_needed(self._options.block_size)
        needed = 0 if most is None else max(most, 1)
        return FindGroup(needed=needed, here=bytes(i < first or has(group, key(i)) for i in blocks))

    def prefetch(
        self, tokens: bytes, salt: str | None, adapter: bytes, media: list[MediaSpan], done: Callable[[int], None]
    ) -> None:
        """Load blocks of a prompt into slots, then call `done` with the number of its first tokens that are in the pool
        or a slot. tokens: int32. adapter: digest, or empty."""
        keys = self._kv_cache.prompt_keys(tokens, salt, adapter, media)
        num_blocks = len(keys) - 1

        def end() -> None:
            done(self._kv_cache.longest_hit(keys.__getitem__, num_blocks).num_blocks * self._kv_cache.block_size)

        missing = self.find_missing(keys.__getitem__, num_blocks, tokens, media, salt)
        if missing is None:
            end()
        else:
            self.fetches.prefetch(missing, self.clock(), on_end=end)

    def deepest(self, request: Request) -> int:
        fetch = self.fetches.by_request.get(request)
        return 0 if fetch is None else fetch.deepest

    def found_end(self, request: Request) -> int:
        """Return the boundary up to which the tiers have the request's blocks, as far as it is known."""
        fetch = self.fetches.by_request.get(request)
        return 0 if fetch is None else max(fetch.end, fetch.deepest)

    def _let_run(self, request: Request) -> None:
        self._release(request, WaitReason.TIER)

    def hit_shares(self, num_queried: int) -> str:
        """Return the shares of `num_queried` tokens that came from each place, as text for the log line."""
        return self.hits.shares(num_queried)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

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
