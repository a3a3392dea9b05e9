"""Fetches: loads blocks of waiting requests from the disk, the remote store or peers into slots, if that is expected to
be faster than computing them.

    begin → FindBlocks → on_found: worth it? → LoadBlocks … on_loaded … → all blocks loaded → the request may run

The tier process finds the largest boundary at which all KV groups could continue. Blocks of groups with windows are
loaded first, since without them no other is of use. If a block cannot be read then, it asks once more for a boundary.
fetch_wait.py says how long a request waits. Then it runs with the loaded blocks; blocks that come before its admission
are used, too. A fetch holds each slot with one of its blocks until its request is admitted or ends: otherwise the
blocks of a prompt that is larger than the arena would evict each other. If it needs more slots than there are, its
blocks are copied to the pool, and their slots are released before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

import numpy as np

from ....ipc.codec import encode_ids
from ....ipc.messages.tier import HERE, BlocksFound, BlocksLoaded, CancelLoad, CoreToTier, FindBlocks, LoadBlocks
from ....ipc.spec.kv.kv_groups import KVGroup
from ...kv.block_pool import BlockPool
from ...request import Request
from .costs import ComputeCost
from .fetch import Fetch, Item, Load, MissingBlocks
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
        groups: Sequence[KVGroup],
        pools: Sequence[BlockPool],
        slots: Slots,
        compute: ComputeCost,
        block_size: int,
        send: Callable[[CoreToTier], None],
        release: Callable[[Request], None],
    ) -> None:
        """send: sends a message to the tier process. release: lets a request run."""
        self._pools, self._slots, self._block_size = pools, slots, block_size
        self._rule = WaitRule(groups, compute, block_size, slots.slot_bytes)
        self._windows_first = sorted(range(len(groups)), key=lambda group: groups[group].is_full)
        self._is_whole = len(groups) > 1 or not groups[0].is_full
        self.hits = Hits(block_size, 4 * slots.num_slots)
        self._send, self._release = send, release
        self.on_found_names: Callable[[Iterable[bytes], int], None] = lambda names, source: None
        self.reads_salted_remotely = True  # blocks of tenants may be in the remote store
        self._asked: dict[int, Fetch] = {}
        self.by_request: dict[Request, Fetch] = {}  # until the request is admitted, even if it waits no longer
        self._others: set[Fetch] = set()  # prefetches
        self._loads: dict[int, Load] = {}
        self._loading: dict[bytes, int] = {}  # jobs by name
        self._loading_bytes = 0
        self._numbers = count(1)
        self._max_loading_bytes = max(int(LOADING_SHARE * slots.num_bytes), max(slots.slot_bytes))

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

    def begin(
        self,
        request: Request,
        missing: MissingBlocks,
        now: float,
        look_again: Callable[[], MissingBlocks | None] | None = None,
    ) -> bool:
        """Ask the tier process for the missing blocks of a request. Return False if too few are missing to be worth it:
        then the request need not wait. look_again: returns those that are missing later."""
        grace_s = self._rule.grace_s(missing)
        if grace_s is None:
            return False
        fetch = Fetch(request, missing, now, grace_s, self._is_whole, give_up_at=now + grace_s, look_again=look_again)
        self.by_request[request] = fetch
        self._ask(fetch)
        return True

    def prefetch(self, missing: MissingBlocks, now: float, on_end: Callable[[], None]) -> None:
        """Load missing blocks into slots for later requests, as many as fit, for at most PREFETCH_S; then call
        `on_end`."""
        fetch = Fetch(
            request=None,
            missing=missing,
            begun_at=now,
            grace_s=0.0,
            is_whole=self._is_whole,
            on_end=on_end,
            give_up_at=now + PREFETCH_S,
            is_waiting=False,
        )
        self._others.add(fetch)
        self._ask(fetch)

    def _ask(self, fetch: Fetch) -> None:
        serial, missing = next(self._numbers), fetch.missing
        self._asked[serial] = fetch
        fetch.is_asking = True
        self._send(
            FindBlocks(
                serial=serial,
                parent=missing.parent,
                token_ids=missing.tokens,
                block_size=self._block_size,
                groups=list(missing.groups),
                least=missing.least,
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
        fetch.is_asking = False
        self._slots.free(fetch.set_items(message, self._windows_first, self._slots.slot_bytes))
        for source in {*fetch.sources} - {HERE}:
            self.on_found_names(fetch.names_at(source), source)
        if fetch.request is None and self._cut_to_fit(fetch):
            return
        num_worth = self._rule.num_worth(fetch)
        probe = self._rule.probe(fetch, now) if num_worth == 0 else None
        if probe is not None:
            self._cut(fetch, probe + 1)
            self._order(fetch, now)
            self._let_run(fetch)
            return
        self._cut(fetch, num_worth)
        self._go_on(fetch, now)

    def _cut_to_fit(self, fetch: Fetch) -> bool:
        """Give up the last blocks of a prefetch that is larger than what may be loaded at once. If they are of use only
        all together, ask for a smaller boundary, and return True."""
        num_fitting = sum(end <= self._max_loading_bytes for end in fetch.bytes_before[1:])
        if num_fitting == len(fetch.items):
            return False
        smaller = self._rule.smaller(fetch, self._max_loading_bytes)
        if smaller is None:
            self._cut(fetch, 0 if fetch.is_whole else num_fitting)
            return False
        fetch.missing = smaller
        self._ask(fetch)
        return True

    # ── loads ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, fetch: Fetch, now: float) -> bool:
        """Order the loads of missing blocks while slots are free; one order for each run of blocks from one source.
        Return False if the next block was here when the question was asked, but is not any more."""
        run: dict[int, Item] = {}
        is_gone = False
        source, num_bytes = -1, self._loading_bytes
        while fetch.num_ordered < len(fetch.items):
            item, of = fetch.items[fetch.num_ordered], fetch.sources[fetch.num_ordered]
            if not self._is_here(fetch, item) and item.name not in self._loading:
                if of == HERE:
                    is_gone = True
                    break
                num_bytes += self._slots.slot_bytes[item.group]
                is_room = num_bytes <= self._max_loading_bytes
                slot = self._slots.allocate_for(fetch.missing.owner, item.group) if is_room else None
                if slot is None:
                    break
                if of != source:
                    self._send_load(fetch, source, run, now)
                    run, source = {}, of
                run[slot] = item
            fetch.num_ordered += 1
        self._send_load(fetch, source, run, now)
        return not is_gone

    def _is_here(self, fetch: Fetch, item: Item) -> bool:
        """Return whether the pool or a slot has a block; take a reference to the slot if the fetch wants it."""
        return self._pools[item.group].lookup(item.key) is not None or self._hold(fetch, item)

    def _hold(self, fetch: Fetch, item: Item) -> bool:
        """Take a reference to the slot with a block, if the fetch wants it. Return whether a slot has the block."""
        slot = self._slots.find(item.name)
        if slot is not None and fetch.wants(item.name):
            self._slots.touch([slot])
            fetch.held[item.name] = slot
        return slot is not None

    def _send_load(self, fetch: Fetch, source: int, item_by_slot: dict[int, Item], now: float) -> None:
        if not item_by_slot:
            return
        job = next(self._numbers)
        self._loads[job] = Load(fetch, source, item_by_slot, len(item_by_slot))
        num_bytes = sum(map(self._slots.bytes_of, item_by_slot))
        self._rule.costs[source].on_order(num_bytes, now)
        self._loading_bytes += num_bytes
        names = [item.name for item in item_by_slot.values()]
        self._loading.update(dict.fromkeys(names, job))
        fetch.jobs.add(job)
        sources = bytes([source]) * len(names)
        self._send(LoadBlocks(job=job, keys=b"".join(names), slots=encode_ids(item_by_slot), sources=sources))

    def on_loaded(self, message: BlocksLoaded, now: float) -> None:
        """Take back the slots that a load has filled or given up, and let requests run that have all their blocks."""
        load = self._loads.get(message.job)
        if load is None:
            return
        good = np.frombuffer(message.slots, np.int32).tolist()
        for slot in good:
            item = load.item_by_slot.pop(slot)
            self._end_load(slot, item)
            if not load.is_void:
                self.hits.note_origin(item.name, FIRST_SOURCE + load.source)
                self._slots.cache_written(slot, item.key)
                if load.fetch is not None:
                    self._hold(load.fetch, item)
            self._slots.free([slot])
        bad = [(slot, load.item_by_slot.pop(slot)) for slot in np.frombuffer(message.bad_slots, np.int32).tolist()]
        if message.is_last:
            bad += load.item_by_slot.items()
            del self._loads[message.job]
        good_bytes = sum(map(self._slots.bytes_of, good))
        self._rule.costs[load.source].on_report(good_bytes, sum(self._slots.bytes_of(slot) for slot, _ in bad), now)
        for slot, item in bad:
            self._end_load(slot, item)
            self._slots.free([slot])
        bad_names = {item.name for _, item in bad}
        for fetch in self._open:
            if bad_names:
                self._fail(fetch, min(fetch.index_by_name.get(name, len(fetch.items)) for name in bad_names))
            self._go_on(fetch, now)

    def _end_load(self, slot: int, item: Item) -> None:
        del self._loading[item.name]
        self._loading_bytes -= self._slots.bytes_of(slot)

    def _fail(self, fetch: Fetch, index: int) -> None:
        """Give up the blocks of a fetch from `index` on, since this one cannot be loaded. If they are of use only all
        together, ask for another boundary once; the second time let the request run."""
        if index >= len(fetch.items):
            return
        self._cut(fetch, index)
        if not fetch.is_whole:
            return
        look_again, fetch.look_again = fetch.look_again, None
        missing = look_again() if look_again is not None else None
        if missing is None:
            self._let_run(fetch)
        else:
            fetch.missing = missing
            self._ask(fetch)

    def _cut(self, fetch: Fetch, num_blocks: int) -> None:
        """Give up the blocks of a fetch from `num_blocks` on, and release their slots."""
        given_up = [item.name for item in reversed(fetch.items[num_blocks:])]
        self._slots.free(fetch.held.pop(name) for name in given_up if name in fetch.held)
        del fetch.items[num_blocks:]
        fetch.num_ordered = min(fetch.num_ordered, num_blocks)
        fetch.num_ready = min(fetch.num_ready, num_blocks)

    def _go_on(self, fetch: Fetch, now: float) -> None:
        """Hold the blocks that have come, order missing ones, and let the request run, or end the prefetch, if all are
        loaded."""
        if fetch.is_asking:
            return
        self._take_ready(fetch)
        if not self._order(fetch, now):
            self._fail(fetch, fetch.num_ordered)
        elif fetch.num_ready >= len(fetch.items):
            self._let_run(fetch)
        elif fetch.request is not None:
            fetch.give_up_at = self._rule.give_up_at(fetch)

    def _take_ready(self, fetch: Fetch) -> None:
        while fetch.num_ready < len(fetch.items):
            item = fetch.items[fetch.num_ready]
            if not self._is_here(fetch, item):
                if item.name not in self._loading:  # it was loaded, but has been evicted since
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
        loading = {load.fetch for load in self._loads.values()}
        short = [each for each in self.by_request.values() if each.num_ordered < len(each.items)]
        return [each for each in short if each.is_waiting and self._has_enough(each, is_loading=each in loading)]

    def _has_enough(self, fetch: Fetch, *, is_loading: bool) -> bool:
        if not is_loading:
            return bool(fetch.held)
        held_bytes = sum(map(self._slots.bytes_of, fetch.held.values()))
        return held_bytes >= LANDING_SHARE * self._max_loading_bytes

    def let_go(self, fetch: Fetch, items: Iterable[Item]) -> None:
        """Release the slots of these blocks, which the fetch holds."""
        self._slots.free(fetch.held.pop(item.name) for item in items)

    def on_slots_free(self, now: float) -> None:
        """Order loads that waited for slots."""
        for fetch in list(self.by_request.values()):
            if fetch.num_ready < len(fetch.items):
                self._go_on(fetch, now)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def forget(self, request: Request) -> None:
        """End the fetch of a request that is admitted or ends, if there is one."""
        if (fetch := self.by_request.pop(request, None)) is not None:
            fetch.is_waiting = False
            self._drop(fetch)

    def _drop(self, fetch: Fetch) -> None:
        self._slots.free(fetch.held.pop(item.name) for item in reversed(fetch.held_items))
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
            fetch.is_asking = False
            self._let_run(fetch)

    def on_tier_lost(self) -> None:
        """Take back all slots that were being loaded, and let all requests run with the blocks that have come."""
        for load in self._loads.values():
            self._slots.free(load.item_by_slot)
        for cost in self._rule.costs:
            cost.on_lost()
        self._loads.clear()
        self._loading.clear()
        self._loading_bytes = 0
        self._asked.clear()
        for fetch in self._open:
            fetch.is_asking = False
            self._cut(fetch, fetch.num_ready)
            self._let_run(fetch)

    def references(self) -> list[int]:
        """Return the slots that fetches and loads refer to, once for each reference."""
        fetches = self._open
        held = [slot for fetch in fetches for slot in fetch.held.values()]
        return held + [slot for load in self._loads.values() for slot in load.item_by_slot]
