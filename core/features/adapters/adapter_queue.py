"""AdapterQueue: loads the adapters of waiting requests into the workers' slots.

A request with an adapter waits (WaitReason.ADAPTER) until all ranks hold the adapter. Adapters are loaded in the
policy's order of the first requests that wait for them, however far back in the queue these are, so that loading is
ahead of admission. A slot is taken from an adapter without rows: one that no request waits for, the least recently used
first; or else one whose waiting requests come later in order, the last of these first.

Requests with other adapters may overtake a request that waits for a slot, MAX_OVERTAKES times. Then the slot with the
fewest rows is closed: it admits no more rows, drains, and is filled.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec

from ....ipc.errors import InternalError, error_info
from ....ipc.messages.adapter import NO_SLOT, AdapterRef, AdaptersProgress, FillSlot
from ....ipc.messages.base import FinishReason
from ....ipc.messages.workers import SlotFilled
from ....ipc.process.awake_clock import AwakeClock
from ....ipc.spec.config.engine_spec import EngineSpec
from ...request import Request, State, WaitReason
from ...scheduling.scheduler import Scheduler
from ...scheduling.step.ledger import LedgerEntry
from ...scheduling.step_feature import Engine, StepFeature, StepPlan
from .adapter_table import AdapterSlot, AdapterTable, SlotState

MAX_FILLS = 2  # fills under way at once
MAX_OVERTAKES = 64  # admissions of requests with other adapters past one that waits for a slot
MAX_REPORTED = 64  # largest number of adapters with waiting requests in a report


class AdapterDemand:
    """The waiting requests that name one adapter, in a heap with lazy removal. Invariant after `settle`: `first` is the
    first of these requests in the policy's order, and `sort_key` is the sort key of that request."""

    def __init__(self, adapter: AdapterRef) -> None:
        self.adapter = adapter
        self.num_overtakes = 0
        self.first: Request | None = None
        self.sort_key = math.inf
        self._heap: list[tuple[float, int, Request]] = []
        self._tie = itertools.count()

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.sort_key, next(self._tie), request))
        self.settle()

    def settle(self) -> None:
        """Drop requests at the top that no longer wait."""
        while self._heap and self._heap[0][2].state is not State.WAITING:
            heapq.heappop(self._heap)
        self.first = self._heap[0][2] if self._heap else None
        self.sort_key = self._heap[0][0] if self._heap else math.inf

    def requests(self) -> list[Request]:
        """Return the waiting requests in the policy's order. One that was preempted may be in the heap twice."""
        return list(dict.fromkeys(each for _, _, each in sorted(self._heap) if each.state is State.WAITING))


class AdapterQueue(StepFeature):
    """Owner of the table of slots and of the demand for each adapter. Invariant: `wanting` has the demands with waiting
    requests and neither a ready slot nor a fill under way. `closed`: the slot that is being drained, if any."""

    def __init__(
        self,
        spec: EngineSpec,
        scheduler: Scheduler,
        clock: AwakeClock,
        engine: Engine,
        is_held: Callable[[Request], bool],
    ) -> None:
        """is_held: returns whether a waiting request must not run now; no slot is filled or kept for it."""
        self.table = AdapterTable(spec.config.max_loras if spec.config.enable_lora else 0, spec.ranks)
        self.wanting: dict[bytes, AdapterDemand] = {}
        self.closed: AdapterSlot | None = None
        self._demand_by_digest: dict[bytes, AdapterDemand] = {}
        self._waiting, self._ledger = scheduler.waiting, scheduler.ledger
        self._clock, self._engine, self._is_held = clock, engine, is_held
        self._timeout_s = spec.config.start_timeout_s  # of a fill
        self._totals, self._counted_at = AdaptersProgress(num_slots=len(self.table.slots)), clock.now

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, request: Request) -> None:
        """Add a request to the demand for its adapter. If no slot is ready with the adapter, the request gets
        WaitReason.ADAPTER."""
        if request.adapter is None:
            return
        digest = request.adapter.digest
        demand = self._demand_by_digest.get(digest)
        if demand is None:
            demand = self._demand_by_digest[digest] = AdapterDemand(request.adapter)
        demand.add(request)
        self._totals.num_queued += 1
        if self._is_ready(digest):
            self._totals.num_hits += 1
            return
        self._block(request)
        if self.table.find(digest) in (None, self.closed):
            self.wanting[digest] = demand

    def holds(self, request: Request) -> bool:
        """Return whether a waiting request's adapter has lost its slot; then the request gets WaitReason.ADAPTER."""
        if request.adapter is None or self._is_ready(request.adapter.digest):
            return False
        self._block(request)
        return True

    def admit(self, request: Request, num_computed: int) -> None:
        """Assign its adapter's slot to a request that has received a row, and count an overtake for each adapter
        without a slot whose first waiting request comes before it in order."""
        if request.adapter is None:
            return
        slot = self.table.find(request.adapter.digest)
        assert slot is not None and slot.state is SlotState.READY, "holds tells"
        slot.num_rows += 1
        request.adapter_slot = slot.number
        self._settle(request.adapter.digest)
        for demand in self.wanting.values():
            if demand.sort_key < request.sort_key:
                demand.num_overtakes += 1

    def leave(self, request: Request, last_step: int) -> None:
        if request.adapter is not None:
            slot = self.table.slot(request.adapter_slot)
            slot.num_rows -= 1
            slot.used_until = last_step
            request.adapter_slot = NO_SLOT

    def end(self, request: Request, reason: FinishReason | None) -> None:
        if request.adapter is not None:
            self._unblock(request)
            self._settle(request.adapter.digest)

    def reset(self, lost: Sequence[LedgerEntry]) -> None:
        self.table.reset()
        self.closed = None
        self.wanting = self._demand_by_digest.copy()

    def in_work(self, oldest: LedgerEntry | None) -> list[Request]:
        """Return a request for each adapter that is being loaded: the first in order that may run."""
        demands = [self._demand_by_digest.get(slot.digest) for slot in self.table.filling]
        return [first for demand in demands if demand is not None and (first := self._first_of(demand)) is not None]

    def _is_ready(self, digest: bytes) -> bool:
        slot = self.table.find(digest)
        return slot is not None and slot.state is SlotState.READY

    def _block(self, request: Request) -> None:
        request.waits_for.add(WaitReason.ADAPTER)
        self._count_waiting(1)

    def _unblock(self, request: Request) -> None:
        if WaitReason.ADAPTER in request.waits_for:
            self._count_waiting(-1)
            self._waiting.release(request, WaitReason.ADAPTER)

    def _count_waiting(self, change: int) -> None:
        self._totals.wait_s += self._totals.num_waiting * (self._clock.now - self._counted_at)
        self._totals.num_waiting += change
        self._counted_at = self._clock.now

    def _settle(self, digest: bytes) -> None:
        demand = self._demand_by_digest.get(digest)
        if demand is None:
            return  # a running request has ended, and no other names its adapter
        demand.settle()
        if demand.first is None:
            del self._demand_by_digest[digest]
            self.wanting.pop(digest, None)

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, step: StepPlan) -> None:
        if self.wanting or self.closed:
            last_done = step.number - 1 - len(self._ledger)
            step.delta.fills = self._begin_fills(step.number, last_done)

    def _begin_fills(self, step: int, last_done: int) -> list[FillSlot]:
        """Start as many fills as possible and return them, to be sent with the next step, `step`. last_done: number of
        the last step with a result."""
        fills: list[FillSlot] = []
        while (demand := self._first_wanting()) is not None:
            slot = self.table.find(demand.adapter.digest)
            if slot is not None:  # it was closed for a later request
                self._reopen(slot)
                continue
            slot = self._free_slot(self._key(demand), last_done) if len(self.table.filling) < MAX_FILLS else None
            if slot is None:
                break
            self.closed = None if slot is self.closed else self.closed
            self._want(slot.digest)
            del self.wanting[demand.adapter.digest]
            demand.num_overtakes = 0
            first = self._first_of(demand)
            assert first is not None and first.adapter is not None, "_first_wanting tells"
            fills.append(self.table.fill(slot, first.adapter, step, self._clock.now, len(self.wanting) + 1))
        overtaken = [self._key(demand) for demand in self.wanting.values() if demand.num_overtakes >= MAX_OVERTAKES]
        if overtaken and self.closed is None:
            self._close_one(min(overtaken))
        elif self.closed is not None and not overtaken:
            self._reopen(self.closed)
        return fills

    def _first_wanting(self) -> AdapterDemand | None:
        """Return the demand with the first request in the policy's order that may run and has no slot."""
        demand = min(self.wanting.values(), key=attrgetter("sort_key"), default=None)
        if demand is not None and demand.first is not None and self._is_held(demand.first):
            demand = min(self.wanting.values(), key=self._key)
            return demand if self._first_of(demand) is not None else None
        return demand

    def _first_of(self, demand: AdapterDemand) -> Request | None:
        """Return the first request of a demand that is not held."""
        if demand.first is None or not self._is_held(demand.first):
            return demand.first
        return next((request for request in demand.requests() if not self._is_held(request)), None)

    def _key(self, demand: AdapterDemand | None) -> float:
        """Return the sort key of the first request of a demand that may run; infinite if there is none."""
        # Not `sort_key`, the key of the first request: that one may be held (paused, isolated after a crash, without
        # its blobs), and a slot filled or kept for it would stand idle while others wait. Without held requests the
        # key can only be larger, so `_first_wanting` looks at `sort_key` first and seldom sorts a demand's requests.
        first = None if demand is None else self._first_of(demand)
        return math.inf if first is None else first.sort_key

    def _free_slot(self, sort_key: float, last_done: int) -> AdapterSlot | None:
        """Return the slot to fill for a request with this sort key; None if all are used, or kept for requests before
        it in order."""
        free = [slot for slot in self.table.slots if slot.is_free(last_done)]
        if (at_once := next((slot for slot in free if slot.state is not SlotState.READY), None)) is not None:
            return at_once
        next_keys = {slot: self._key(self._demand_by_digest.get(slot.digest)) for slot in free}
        behind = [slot for slot in free if next_keys[slot] > sort_key]
        return max(behind, key=lambda slot: (next_keys[slot], -slot.used_until), default=None)

    def _want(self, digest: bytes) -> None:
        """Record that an adapter loses its slot, or that the slot is closed: its waiting requests need a slot again."""
        if (demand := self._demand_by_digest.get(digest)) is not None:
            self.wanting[digest] = demand

    def _close_one(self, sort_key: float) -> None:
        """Close the slot with the fewest rows, for a request with this sort key. Slots for which earlier requests wait
        stay open."""
        ready = [slot for slot in self.table.slots if slot.state is SlotState.READY]
        behind = [slot for slot in ready if self._key(self._demand_by_digest.get(slot.digest)) > sort_key]
        if behind:
            self.closed = min(behind, key=attrgetter("num_rows"))
            self.closed.move(SlotState.CLOSED)
            self._want(self.closed.digest)
            self._totals.num_closed += 1

    def _reopen(self, slot: AdapterSlot) -> None:
        slot.move(SlotState.READY)
        self.closed = None
        self._serve(slot.digest)

    def _serve(self, digest: bytes) -> None:
        """Let the requests with an adapter run, since its slot is ready."""
        self.wanting.pop(digest, None)
        if (demand := self._demand_by_digest.get(digest)) is not None:
            demand.num_overtakes = 0
            for request in demand.requests():
                self._unblock(request)

    def on_filled(self, message: SlotFilled) -> None:
        """Apply a rank's answer to a FillSlot. When all ranks have filled the slot, requests with its adapter may run;
        at the first error they end with an error."""
        slot = self.table.slot_of(message.slot, message.step, message.rank)
        if slot is None:
            return
        if message.error and slot.state is SlotState.FILLING:
            self._fail(slot, f"worker {message.rank}: {message.error}")
        self.table.answer(slot, message.rank)
        if slot.state is SlotState.READY:
            self._totals.num_fills += 1
            self._totals.fill_s += self._clock.now - slot.begun_at
            self._serve(slot.digest)

    def next_deadline(self) -> float | None:
        """Return the time, by the clock, at which the oldest fill under way has taken too long; None without fills."""
        filling = self.table.filling
        return filling[0].begun_at + self._timeout_s if filling else None

    def expire(self, now: float) -> None:
        """End requests whose adapter takes too long to load. If every slot has such a fill, end all requests that wait
        for a slot."""
        if self.table.filling or self.wanting:
            overdue = [slot for slot in self.table.slots if slot.ranks_left and now > slot.begun_at + self._timeout_s]
            for slot in overdue:
                if slot.state is SlotState.FILLING:
                    ranks = " and ".join(f"worker {rank}" for rank in sorted(slot.ranks_left))
                    self._fail(slot, f"{ranks} did not answer within --start-timeout-s {self._timeout_s:g} s")
            for demand in list(self.wanting.values()) if len(overdue) == len(self.table.slots) else ():
                self.give_up(demand.adapter, f"all {len(overdue)} slots wait for workers that do not answer")

    def _fail(self, slot: AdapterSlot, reason: str) -> None:
        """Spoil a slot that is being filled, and end the requests with its adapter."""
        self._totals.num_failed_fills += 1
        self.table.spoil(slot)
        if (demand := self._demand_by_digest.get(slot.digest)) is not None:
            self.give_up(demand.adapter, reason)

    def give_up(self, adapter: AdapterRef, reason: str) -> None:
        """End all waiting requests with this adapter with an error."""
        error = error_info(InternalError(f"the adapter {adapter.place} could not be loaded: {reason}"))
        for request in self._demand_by_digest[adapter.digest].requests():
            self._engine.end(request, "error", error)

    def report(self) -> dict[str, AdaptersProgress]:
        self._count_waiting(0)
        waiting = [demand for digest, demand in self._demand_by_digest.items() if not self._is_ready(digest)]
        first = heapq.nsmallest(MAX_REPORTED, waiting, key=attrgetter("sort_key"))
        progress = msgspec.structs.replace(
            self._totals,
            num_ready=self.table.count(SlotState.READY),
            num_filling=len(self.table.filling),
            running=[slot.digest for slot in self.table.slots if slot.num_rows],
            waiting=[demand.adapter.digest for demand in first],
        )
        return {"adapters": progress}

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self, requests: Sequence[Request]) -> None:
        running = [each for each in requests if each.row >= 0]
        self.table.check_invariants([(each.adapter_slot, each.adapter.digest) for each in running if each.adapter])
        named = [(each, each.adapter.digest) for each in requests if each.row < 0 and each.adapter is not None]
        demanded = [(request, key) for key, demand in self._demand_by_digest.items() for request in demand.requests()]
        assert len(demanded) == len(named) and set(demanded) == set(named), "a waiting request is forgotten"
        blocked = [digest for request, digest in named if WaitReason.ADAPTER in request.waits_for]
        assert self._totals.num_waiting == len(blocked) and not any(map(self._is_ready, blocked)), (
            "its adapter is ready"
        )
        assert not any(request.adapter_slot for request, _ in named)
        assert all(demand.first is demand.requests()[0] for demand in self._demand_by_digest.values())
        unserved = [each for each in self._demand_by_digest if self.table.find(each) in (None, self.closed)]
        assert sorted(unserved) == sorted(self.wanting)
        assert self.table.count(SlotState.CLOSED) == (self.closed is not None)
        assert self.closed is None or self.closed.state is SlotState.CLOSED
