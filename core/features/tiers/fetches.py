"""Fetches: loads blocks of waiting requests from the disk, the remote store or peers into slots, if that is expected to
be faster than computing them.

    begin → FindBlocks → on_found: worth it? → LoadBlocks … on_loaded … → all blocks loaded → the request may run

fetch_wait.py says how long a request waits. Then it runs with the loaded blocks; blocks that come before its admission
are used, too. A fetch holds each slot with one of its blocks until its request is admitted or ends: otherwise the
blocks of a prompt that is larger than the arena would evict each other. If it needs more slots than there are, its
blocks are copied to the pool, and their slots are released before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

import numpy as np

from ....ipc.codec import encode_ids
from ....ipc.messages.tier import (
    BlocksFound,
    BlocksLoaded,
    CancelLoad,
    CoreToTier,
    FindBlocks,
    FindGroup,
    LoadBlocks,
)
from ...kv.block_pool import BlockPool
from ...request import Request
from .costs import ComputeCost
from .fetch import Fetch, Load, MissingBlocks
from .fetch_wait import WaitRule
from .hits import FIRST_SOURCE, Hits
from .slots import Slots

PREFETCH_S = 30.0  # longest prefetch
LOADING_SHARE = 0.75  # of all slots, at most, that loads may fill at once
LANDING_SHARE = 0.25  # of these, the fewest that are copied to the pool at once while others are being filled


class Fetches:
    """Owner of the fetches and the slots that are being loaded."""

    def __init__(
        self,
        pool: BlockPool,
        slots: Slots,
        compute: ComputeCost,
        block_size: int,
        send: Callable[[CoreToTier], None],
        release: Callable[[Request], None],
    ) -> None:
        """send: sends a message to the tier process. release: lets a request run."""
        self._pool, self._slots, self._block_size = pool, slots, block_size
        self._rule = WaitRule(compute, block_size)
        self.hits = Hits(block_size, 4 * slots.num_slots)
        self._send, self._release = send, release
        self.on_found_keys: Callable[[Iterable[bytes], int], None] = lambda keys, source: None
        self.reads_salted_remotely = True  # blocks of tenants may be in the remote store
        self._asked: dict[int, Fetch] = {}
        self.by_request: dict[Request, Fetch] = {}  # until the request is admitted, even if it waits no longer
        self._others: set[Fetch] = set()  # prefetches
        self._loads: dict[int, Load] = {}
        self._loading: dict[bytes, int] = {}  # jobs by key
        self._numbers = count(1)
        self._max_loading = max(int(LOADING_SHARE * slots.num_slots), 1)

    @property
    def _open(self) -> list[Fetch]:
        return [*self.by_request.values(), *self._others]

    @property
    def next_deadline(self) -> float | None:
        """Time of the next call of `tick` that ends a wait or a prefetch, in monotonic seconds; None: nothing waits."""
        waiting = [each for each in self.by_request.values() if each.is_waiting]
        return min((each.give_up_at for each in (*waiting, *self._others)), default=None)

    @property
    def num_waiting(self) -> int:
        return sum(fetch.is_waiting for fetch in self.by_request.values())

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, request: Request, missing: MissingBlocks, now: float) -> bool:
        """Ask the tier process for the missing blocks of a request. Return False if too few are missing to be worth it:
        then the request need not wait."""
        num_blocks = len(missing.tokens) // (4 * self._block_size)
        grace_s = self._rule.grace_s(missing.start, missing.start + num_blocks)
        if grace_s is None:
            return False
        fetch = Fetch(request, missing.start, missing.first_keys, now, grace_s, missing.owner, give_up_at=now + grace_s)
        self.by_request[request] = fetch
        self._ask(fetch, missing)
        return True

    def prefetch(self, missing: MissingBlocks, now: float, on_end: Callable[[], None]) -> None:
        """Load missing blocks into slots for later requests, as many as fit, for at most PREFETCH_S; then call
        `on_end`."""
        fetch = Fetch(
            request=None,
            start=0,
            first_keys=missing.first_keys,
            begun_at=now,
            grace_s=0.0,
            owner=missing.owner,
            on_end=on_end,
            give_up_at=now + PREFETCH_S,
            is_waiting=False,
        )
        self._others.add(fetch)
        self._ask(fetch, missing)

    def _ask(self, fetch: Fetch, missing: MissingBlocks) -> None:
        serial = next(self._numbers)
        self._asked[serial] = fetch
        self._send(
            FindBlocks(
                serial=serial,
                parent=missing.parent,
                token_ids=missing.tokens,
                block_size=self._block_size,
                groups=[FindGroup()],
                least=missing.start,
                skips_remote=missing.owner != 0 and not self.reads_salted_remotely,
                start=missing.start * self._block_size,
                media=list(missing.media),
            )
        )

    def on_found(self, message: BlocksFound, now: float) -> None:
        """Order the loads of those found blocks that are faster to load than to compute; for a prefetch, of all that
        fit. If none is faster, and the source of the first has brought nothing for long, order one block to measure the
        source, for which no request waits."""
        fetch = self._asked.pop(message.serial, None)
        if fetch is None:
            return
        if fetch not in self._others and (fetch.request is None or self.by_request.get(fetch.request) != fetch):
            return  # it is over
        found = message.sources[0]
        fetch.keys = fetch.first_keys(len(found))
        fetch.index_by_key = {key: index for index, key in enumerate(fetch.keys)}
        fetch.sources = found[: len(fetch.keys)]
        for source in set(fetch.sources):
            self.on_found_keys((key for key, of in zip(fetch.keys, fetch.sources, strict=True) if of == source), source)
        if fetch.request is None:
            self._cut(fetch, self._max_loading)
        num_worth = self._rule.num_worth(fetch)
        if num_worth == 0 and self._rule.is_probe_due(fetch, now):
            self._cut(fetch, 1)
            self._order(fetch, now)
            self._let_run(fetch)
            return
        self._cut(fetch, num_worth)
        self._go_on(fetch, now)

    # ── loads ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, fetch: Fetch, now: float) -> None:
        """Order the loads of missing blocks while slots are free; one order for each run of blocks from one source."""
        run: dict[int, bytes] = {}
        source = -1
        while fetch.num_ordered < len(fetch.keys):
            key = fetch.keys[fetch.num_ordered]
            if self._pool.lookup(key) is None and not self._hold(fetch, key) and key not in self._loading:
                is_room = len(self._loading) + len(run) < self._max_loading
                slot = self._slots.allocate_for(fetch.owner) if is_room else None
                if slot is None:
                    break
                if fetch.sources[fetch.num_ordered] != source:
                    self._send_load(fetch, source, run, now)
                    run, source = {}, fetch.sources[fetch.num_ordered]
                run[slot] = key
            fetch.num_ordered += 1
        self._send_load(fetch, source, run, now)

    def _hold(self, fetch: Fetch, key: bytes) -> bool:
        """Take a reference to the slot with a block, if the fetch wants it. Return whether a slot has the block."""
        slot = self._slots.lookup(key)
        if slot is not None and fetch.wants(key):
            self._slots.touch([slot])
            fetch.held[key] = slot
        return slot is not None

    def _send_load(self, fetch: Fetch, source: int, key_by_slot: dict[int, bytes], now: float) -> None:
        if not key_by_slot:
            return
        job = next(self._numbers)
        self._loads[job] = Load(fetch, source, key_by_slot, len(key_by_slot))
        self._rule.costs[source].on_order(len(key_by_slot), now)
        self._loading.update(dict.fromkeys(key_by_slot.values(), job))
        fetch.jobs.add(job)
        keys, sources = b"".join(key_by_slot.values()), bytes([source]) * len(key_by_slot)
        self._send(LoadBlocks(job=job, keys=keys, slots=encode_ids(key_by_slot), sources=sources))

    def on_loaded(self, message: BlocksLoaded, now: float) -> None:
        """Take back the slots that a load has filled or given up, and let requests run that have all their blocks."""
        load = self._loads.get(message.job)
        if load is None:
            return
        good = np.frombuffer(message.slots, np.int32).tolist()
        for slot in good:
            key = load.key_by_slot.pop(slot)
            del self._loading[key]
            if not load.is_void:
                self.hits.note_origin(key, FIRST_SOURCE + load.source)
                self._slots.cache_written(slot, key)
                if load.fetch is not None:
                    self._hold(load.fetch, key)
            self._slots.free([slot])
        bad = [(slot, load.key_by_slot.pop(slot)) for slot in np.frombuffer(message.bad_slots, np.int32).tolist()]
        if message.is_last:
            bad += load.key_by_slot.items()
            del self._loads[message.job]
        self._rule.costs[load.source].on_report(len(good), len(bad), now)
        for slot, key in bad:
            del self._loading[key]
            self._slots.free([slot])
        bad_keys = {key for _, key in bad}
        for fetch in self._open:
            if bad_keys:
                self._cut(fetch, min(fetch.index_by_key.get(key, len(fetch.keys)) for key in bad_keys))
            self._go_on(fetch, now)

    def _cut(self, fetch: Fetch, num_blocks: int) -> None:
        """Give up the blocks of a fetch from `num_blocks` on, and release their slots."""
        self._slots.free(fetch.held.pop(key) for key in reversed(fetch.keys[num_blocks:]) if key in fetch.held)
        del fetch.keys[num_blocks:]
        fetch.num_ordered = min(fetch.num_ordered, num_blocks)

    def _go_on(self, fetch: Fetch, now: float) -> None:
        """Hold the blocks that have come, order missing ones, and let the request run, or end the prefetch, if all are
        loaded."""
        self._take_ready(fetch)
        self._order(fetch, now)
        if fetch.num_ready >= len(fetch.keys):
            self._let_run(fetch)
        elif fetch.request is not None:
            fetch.give_up_at = self._rule.give_up_at(fetch)

    def _take_ready(self, fetch: Fetch) -> None:
        while fetch.num_ready < len(fetch.keys):
            key = fetch.keys[fetch.num_ready]
            if self._pool.lookup(key) is None and not self._hold(fetch, key):
                if key not in self._loading:  # it was loaded, but has been evicted since
                    fetch.num_ordered = min(fetch.num_ordered, fetch.num_ready)
                return
            fetch.num_ready += 1

    def _let_run(self, fetch: Fetch) -> None:
        if fetch.is_waiting and fetch.request is not None:
            fetch.is_waiting = False
            self._release(fetch.request)
        elif fetch.on_end is not None and fetch in self._others:
            self._others.discard(fetch)
            self._drop(fetch)
            fetch.on_end()

    def tick(self, now: float) -> None:
        """Let requests run that have waited long enough; their loads continue. End prefetches that take too long."""
        for fetch in self._open:
            if (fetch.is_waiting or fetch.request is None) and now >= fetch.give_up_at:
                self._let_run(fetch)

    # ── slots that are short ─────────────────────────────────────────────────────────────────────────────────────

    def stalled(self) -> list[Fetch]:
        """Return the fetches with waiting requests that can only get more slots by giving up their own: those that hold
        enough to be worth a copy to the pool, or that hold any and have no load under way."""
        loading, enough = {load.fetch for load in self._loads.values()}, LANDING_SHARE * self._max_loading
        short = [each for each in self.by_request.values() if each.num_ordered < len(each.keys)]
        return [each for each in short if each.is_waiting and len(each.held) >= (enough if each in loading else 1)]

    def held_keys(self, fetch: Fetch) -> list[bytes]:
        """Return the keys of the blocks whose slots a fetch holds, in the prompt's order."""
        return sorted(fetch.held, key=fetch.index_by_key.__getitem__)

    def let_go(self, fetch: Fetch, keys: list[bytes]) -> None:
        """Release the slots of these blocks, which the fetch holds."""
        self._slots.free(fetch.held.pop(key) for key in keys)

    def on_slots_free(self, now: float) -> None:
        """Order loads that waited for slots."""
        for fetch in list(self.by_request.values()):
            if fetch.num_ready < len(fetch.keys):
                self._go_on(fetch, now)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def forget(self, request: Request) -> None:
        """End the fetch of a request that is admitted or ends, if there is one."""
        if (fetch := self.by_request.pop(request, None)) is not None:
            fetch.is_waiting = False
            self._drop(fetch)

    def _drop(self, fetch: Fetch) -> None:
        self._slots.free(fetch.held[key] for key in reversed(self.held_keys(fetch)))
        fetch.held = {}
        for job in fetch.jobs:
            load = self._loads.get(job)
            if load is not None and load.fetch is fetch:
                load.fetch = None
                if load.num_blocks > 1:  # a single block is a probe
                    self._send(CancelLoad(job=job))

    def void(self) -> None:
        """Give up all fetches because all content is cleared: blocks that still come are not found, and requests run
        without them."""
        for load in self._loads.values():
            load.is_void = True
        self._asked.clear()
        for fetch in self._open:
            self._cut(fetch, 0)
            fetch.num_ready = 0
            self._let_run(fetch)

    def on_tier_lost(self) -> None:
        """Take back all slots that were being loaded, and let all requests run with the blocks that have come."""
        for load in self._loads.values():
            self._slots.free(load.key_by_slot)
        for cost in self._rule.costs:
            cost.on_lost()
        self._loads.clear()
        self._loading.clear()
        self._asked.clear()
        for fetch in self._open:
            self._cut(fetch, fetch.num_ready)
            self._let_run(fetch)

    def references(self) -> list[int]:
        """Return the slots that fetches and loads refer to, once for each reference."""
        fetches = self._open
        held = [slot for fetch in fetches for slot in fetch.held.values()]
        return held + [slot for load in self._loads.values() for slot in load.key_by_slot]
