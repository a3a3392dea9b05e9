"""The queue for adapters and its table against plain dicts, for random operations with two steps in flight; and its
laws one by one."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from tokenloom.core.request import Request, State, WaitReason
from tokenloom.core.scheduling.adapter_queue import MAX_FILLS, MAX_OVERTAKES, AdapterQueue
from tokenloom.core.scheduling.adapter_table import LEGAL_MOVES, AdapterSlot, AdapterTable, SlotState
from tokenloom.core.scheduling.waiting_queue import WaitingQueue
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.adapter import FillSlot, SlotContent
from tokenloom.ipc.messages.base import FinishReason, Rank
from tokenloom.ipc.messages.workers import SlotFilled
from tokenloom.ipc.process.awake_clock import AwakeClock
from tokenloom.ipc.sampling_params import SamplingParams
from tokenloom.tests.core.fake_adapters import adapter_of, digest_of
from tokenloom.tests.core.harness import make_spec

TIMEOUT_S = 10.0


def new_request(adapter: int, sort_key: float) -> Request:
    return Request(
        frontend_id=0,
        key=0,
        attempt=0,
        params=SamplingParams(),
        seed=0,
        num_prompt_tokens=1,
        max_tokens=1,
        stop_token_ids=[],
        arrival_time=0.0,
        priority=0,
        sort_key=sort_key,
        tokens=np.zeros(1, np.int32),
        num_tokens=1,
        adapter=adapter_of(adapter),
    )


class Model:
    """A scheduler of rows, workers and the facts about slots in plain dicts. Each operation checks the queue's laws."""

    def __init__(self, num_slots: int, num_ranks: int = 1, max_rows: int = 4) -> None:
        self.spec = make_spec(
            enable_lora=True, max_loras=num_slots, tensor_parallel_size=num_ranks, start_timeout_s=TIMEOUT_S
        )
        self.now, self.epoch, self.max_rows = 0.0, 0, max_rows
        self.clock = AwakeClock(1000.0, lambda: self.now)
        self.requests: list[Request] = []  # unfinished
        self.held: set[Request] = set()
        self.errors: dict[Request, str] = {}
        self.pending: dict[Rank, list[tuple[int, int, FillSlot]]] = {rank: [] for rank in self.spec.ranks}
        self.content: dict[Rank, dict[int, bytes]] = {rank: {} for rank in self.spec.ranks}
        self.fill_waits: list[int] = []  # overtakes of each adapter that got a slot
        self.begin_core([])

    def begin_core(self, contents: list[SlotContent]) -> None:
        self.waiting = WaitingQueue()
        self.queue = AdapterQueue(self.spec, self.waiting, self.clock, self._end, self.held.__contains__)
        self.queue.table.adopt(contents)
        self.step, self.steps = 0, list[tuple[int, set[int]]]()  # in flight: number, slots of its rows
        firsts = {content.digest: content.slot for content in reversed(contents)}  # one slot is enough
        self.ready = {slot: digest for digest, slot in firsts.items()}
        self.fills: dict[int, tuple[bytes, int, set[Rank], float]] = {}  # by slot: digest, step, ranks left, begin
        self.spoiled: dict[int, tuple[int, set[Rank], float]] = {}  # by slot: step, ranks left, begin
        self.used_until = defaultdict[int, int](int)
        self.overtakes = Counter[bytes]()

    # ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def running(self, slot: int = 0) -> list[Request]:
        return [each for each in self.requests if each.row >= 0 and slot in (0, each.adapter_slot)]

    def first_key(self, digest: bytes) -> float:
        """Return the smallest key of a waiting request with this adapter that may run."""
        waiting = (each for each in self.requests if each.row < 0 and each not in self.held)
        return min((each.sort_key for each in waiting if each.adapter and each.adapter.digest == digest), default=1e9)

    def unserved(self) -> set[bytes]:
        """Return the adapters that waiting requests name, without an open slot and without a fill."""
        return self._waited_for() - {digest for slot, digest in self.ready.items() if not self.is_closed(slot)}

    def _waited_for(self) -> set[bytes]:
        """Return the adapters that waiting requests name, without a fill."""
        filling = {digest for digest, *_ in self.fills.values()}
        return {each.adapter.digest for each in self.requests if each.row < 0 and each.adapter} - filling

    def is_closed(self, slot: int) -> bool:
        return self.queue.closed is not None and self.queue.closed.number == slot

    def is_free(self, slot: int) -> bool:
        oldest = self.steps[0][0] if self.steps else self.step + 1
        if slot in self.ready:
            return not self.running(slot) and self.used_until[slot] < oldest
        return slot not in self.fills and slot not in self.spoiled

    def best_slots(self, key: float) -> set[int]:
        """Return the slots that a request with this key may take: empty ones, else those of the last in order, else
        the least recently used of them."""
        free = [slot for slot in range(1, len(self.queue.table.slots) + 1) if self.is_free(slot)]
        at_once = {slot for slot in free if slot not in self.ready or self.is_closed(slot)}
        keys = {slot: self.first_key(self.ready[slot]) for slot in set(free) - at_once}
        behind = {slot for slot in keys if keys[slot] > key}
        last = {slot for slot in behind if keys[slot] == max(keys[each] for each in behind)}
        oldest = min((self.used_until[slot] for slot in last), default=0)
        return at_once or {slot for slot in last if self.used_until[slot] == oldest}

    # ── operations ───────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, adapter: int, key: float) -> Request:
        request = new_request(adapter, key)
        self.requests.append(request)
        self.queue.add(request)
        self.waiting.add(request)
        assert (WaitReason.ADAPTER in request.waits_for) == (not self._is_open(request))
        self.check()
        return request

    def _is_open(self, request: Request) -> bool:
        digests = [digest for slot, digest in self.ready.items() if not self.is_closed(slot)]
        return request.adapter is None or request.adapter.digest in digests

    def schedule(self) -> list[FillSlot]:
        """Admit waiting requests to free rows, begin fills, and send a step with all rows."""
        held_back: list[Request] = []
        while len(self.running()) < self.max_rows and (request := self.waiting.pop()) is not None:
            if request in self.held or self.queue.holds_back(request):
                held_back.append(request)
                continue
            assert self._is_open(request), "it runs without its adapter"
            overtaken = {each for each in self.unserved() if min_key(self.requests, each) < request.sort_key}
            request.move(State.RUNNING)
            request.row = 0
            self.queue.admit(request)
            if request.adapter is not None:
                self.overtakes.update(overtaken)
        for request in held_back:
            self.waiting.add(request)
        fills = self.queue.plan_fills(self.step + 1, self.step - len(self.steps)) if self._is_planning() else []
        self._apply(fills)
        self.step += 1
        self.steps.append((self.step, {each.adapter_slot for each in self.running()} - {0}))
        self.check()
        return fills

    def _is_planning(self) -> bool:
        return bool(self.queue.wanting) or self.queue.closed is not None

    def _apply(self, fills: list[FillSlot]) -> None:
        """Check each fill in turn against the rules, and that no further one was due."""
        for fill in fills:
            key = self.first_key(fill.digest)
            assert key == min(map(self.first_key, self.unserved())) < 1e9, "another adapter is wanted before"
            assert fill.digest in self.unserved() and fill.folder == f"/store/{fill.digest[0]}"
            assert not any(fill.slot in slots for _, slots in self.steps), "refilled under a step in flight"
            assert not self.running(fill.slot) and self.is_free(fill.slot)
            if fill.slot in self.ready and not self.was_closed(fill.slot):
                assert fill.slot in self.best_slots(key), "another slot should have been taken"
            self.fill_waits.append(self.overtakes.pop(fill.digest, 0))
            self.ready.pop(fill.slot, None)
            closing = {digest for slot, digest in self.ready.items() if self.is_closed(slot) != self.was_closed(slot)}
            least, most = self.unserved() - closing, self.unserved() | (closing & self._waited_for())
            assert len(least) <= fill.num_waiting <= len(most)
            self.fills[fill.slot] = fill.digest, self.step + 1, set(self.spec.ranks), self.now
            for rank in self.spec.ranks:
                self.content[rank].pop(fill.slot, None)
                self.pending[rank].append((self.epoch, self.step + 1, fill))
        assert len(self.fills) <= MAX_FILLS
        first = min(map(self.first_key, self.unserved()), default=1e9)
        assert first == 1e9 or len(self.fills) == MAX_FILLS or not self.best_slots(first), "a fill is due"
        if overtaken := [each for each in self.unserved() if self.overtakes[each] >= MAX_OVERTAKES]:
            key = min(map(self.first_key, overtaken))
            behind = [slot for slot, digest in self.ready.items() if self.first_key(digest) > key]
            assert self.queue.closed is not None or not behind, "a slot must be closed"
            if self.queue.closed is not None and self.queue.closed.number != self.closed_before:
                fewest = min(len(self.running(slot)) for slot in behind)
                assert len(self.running(self.queue.closed.number)) == fewest and self.queue.closed.number in behind
        else:
            assert self.queue.closed is None, "a slot stays closed for nobody"
        for digest in set(self.overtakes) - self.unserved():
            del self.overtakes[digest]

    def was_closed(self, slot: int) -> bool:
        return self.closed_before == slot

    def result(self) -> None:
        if self.steps:
            self.steps.pop(0)
        self.check()

    def leave(self, request: Request, state: State) -> None:
        """A request leaves its row: it has finished, or was preempted."""
        self.used_until[request.adapter_slot] = self.step
        self.queue.release(request, self.step)
        request.row = -1
        request.move(state)
        if state is State.WAITING:
            self.queue.add(request)
            self.waiting.add(request)
        else:
            self.requests.remove(request)
        self.check()

    def abort(self, request: Request) -> None:
        request.move(State.FINISHED)
        self.requests.remove(request)
        self.waiting.forget(request)
        self.queue.forget(request)
        for digest in set(self.overtakes) - self.unserved():
            del self.overtakes[digest]
        self.check()

    def _end(self, request: Request, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        assert reason == "error" and error is not None and error.kind == "internal"
        self.errors[request] = error.message
        request.move(State.FINISHED)
        self.requests.remove(request)
        self.waiting.forget(request)
        self.queue.forget(request)

    def answer(self, rank: Rank, error: str = "") -> None:
        """A rank ends its oldest fill."""
        epoch, step, fill = self.pending[rank].pop(0)
        if not error and all(later.slot != fill.slot for _, _, later in self.pending[rank]):
            self.content[rank][fill.slot] = fill.digest
        if epoch != self.epoch:
            return
        victims = {
            each for each in self.requests if each.row < 0 and each.adapter and each.adapter.digest == fill.digest
        }
        num_errors = len(self.errors)
        self.queue.on_filled(
            SlotFilled(
                step=step, core_epoch=0, generation=0, rank=rank, slot=fill.slot, digest=fill.digest, error=error
            )
        )
        known = self.fills.get(fill.slot)
        if known is not None and known[1] == step:
            known[2].discard(rank)
            if error:
                assert victims == set(self.errors) - set(list(self.errors)[:num_errors])
                assert all(
                    f"/store/{fill.digest[0]}" in self.errors[each] and error in self.errors[each] for each in victims
                )
                self.spoiled[fill.slot] = self.fills.pop(fill.slot)[1:]
            elif not known[2]:
                self.ready[fill.slot] = self.fills.pop(fill.slot)[0]
                self.used_until[fill.slot] = step
        elif (late := self.spoiled.get(fill.slot)) is not None and late[0] == step:
            late[1].discard(rank)
        self.spoiled = {slot: late for slot, late in self.spoiled.items() if late[1]}
        self.check()

    def let_pass(self, seconds: float) -> None:
        self.now += seconds
        self.queue.expire(self.clock.look())
        for slot, (digest, *late) in list(self.fills.items()):
            if self.now > late[2] + TIMEOUT_S:
                del self.fills[slot]
                self.spoiled[slot] = tuple(late)  # type: ignore[assignment]
                assert not any(each.adapter.digest == digest for each in self.requests if each.adapter), (
                    "it still waits"
                )
        num_hung = sum(self.now > begin + TIMEOUT_S for _, _, begin in self.spoiled.values())
        if num_hung == len(self.queue.table.slots):
            assert not self.unserved(), "no slot will ever be free"
        for digest in set(self.overtakes) - self.unserved():
            del self.overtakes[digest]
        self.check()

    def reset(self, *, is_group_lost: bool) -> None:
        """The workers are lost, or load other weights: then their answers to fills may still come."""
        for request in self.running():
            self.leave(request, State.WAITING)
        self.queue.reset()
        for rank in self.spec.ranks:
            self.content[rank].clear()
            if is_group_lost:
                self.pending[rank].clear()
        self.ready, self.fills, self.spoiled = {}, {}, {}
        self.steps.clear()
        self.step = self.step + 1 if not is_group_lost else 0
        self.used_until.clear()
        self.check()

    def renew_core(self) -> None:
        """Another core adopts the slots and gets all requests."""
        self.epoch += 1
        first, *others = self.content.values()
        same = {slot: digest for slot, digest in first.items() if all(each.get(slot) == digest for each in others)}
        busy = {fill.slot for pending in self.pending.values() for _, _, fill in pending}
        assert not busy & same.keys()
        requests, self.requests = self.requests, []
        self.begin_core([SlotContent(slot=slot, digest=digest) for slot, digest in same.items()])
        for request in requests:
            assert request.adapter is not None
            again = self.submit(request.adapter.digest[0], request.sort_key)
            if request in self.held:
                self.held.add(again)

    def check(self) -> None:
        """Check that the table agrees with the dicts, and the ranks with the table."""
        self.closed_before = 0 if self.queue.closed is None else self.queue.closed.number
        self.queue.check_invariants([each for each in self.requests if each.row < 0], self.running())
        states = {slot.number: slot.state for slot in self.queue.table.slots}
        expected = dict.fromkeys(states, SlotState.EMPTY)
        expected |= dict.fromkeys(self.fills, SlotState.FILLING) | dict.fromkeys(self.spoiled, SlotState.SPOILED)
        expected |= {slot: SlotState.CLOSED if self.is_closed(slot) else SlotState.READY for slot in self.ready}
        assert states == expected
        for slot, digest in self.ready.items():
            assert all(self.content[rank].get(slot) == digest for rank in self.spec.ranks), "a rank does not hold it"
        for digest, demand in self.queue.wanting.items():
            assert demand.num_overtakes == self.overtakes[digest]


def min_key(requests: list[Request], digest: bytes) -> float:
    """Return the smallest key of a waiting request with this adapter, held or not."""
    waiting = (each for each in requests if each.row < 0 and each.adapter is not None)
    return min(each.sort_key for each in waiting if each.adapter and each.adapter.digest == digest)


def run_random_operations(seed: int, num_operations: int) -> Model:
    """Run operations with random weights: some runs admit and finish much, so that adapters are overtaken."""
    rng = random.Random(seed)
    is_busy = rng.random() < 0.5
    model = Model(rng.choice([1, 2] if is_busy else [1, 2, 3, 5]), rng.choice([1, 2]), rng.choice([1, 4, 12]))
    num_adapters, clock = rng.choice([2, 6, 12]), itertools.count()

    def submit() -> None:
        if len(model.requests) < 60:
            when = next(clock) // rng.choice([1, 1, 2])
            model.submit(min(1 + int(rng.expovariate(0.7)), num_adapters), when + rng.choice([0, 0, 0, 5]))

    def act(choose: Callable[[], list[Request]], action: Callable[[Request], None]) -> Callable[[], None]:
        return lambda: action(rng.choice(found)) if (found := choose()) else None

    def answer() -> None:
        if ranks := [rank for rank, pending in model.pending.items() if pending]:
            model.answer(rng.choice(ranks), rng.choice([""] * 12 + ["a damaged file"]))

    def waiting() -> list[Request]:
        return [each for each in model.requests if each.row < 0]

    weights: dict[Callable[[], None], float] = {
        submit: 25 if is_busy else 12,
        lambda: model.schedule() and None if len(model.steps) < 2 else None: 25,
        model.result: 15,
        act(model.running, lambda request: model.leave(request, State.FINISHED)): 25 if is_busy else 12,
        act(model.running, lambda request: model.leave(request, State.WAITING)): 2,
        act(waiting, model.abort): 2,
        act(waiting, model.held.add): 0.5,
        model.held.clear: 1,
        answer: 20,
        lambda: model.let_pass(rng.choice([1.0, 4.0, 11.0])): 0.5,
        lambda: model.reset(is_group_lost=rng.random() < 0.5): 0.2,
        model.renew_core: 0.2,
    }
    operations = rng.choices(list(weights), list(weights.values()), k=num_operations)
    for operation in operations:
        operation()
    model.held.clear()
    for _ in range(10_000):
        if not model.requests:
            return model
        model.schedule()
        for request in model.running():
            model.leave(request, State.FINISHED)
        for rank in model.spec.ranks:
            while model.pending[rank]:
                model.answer(rank)
        while model.steps:
            model.result()
    raise AssertionError(f"{len(model.requests)} requests do not finish")


@pytest.mark.parametrize("seed", range(40))
def test_the_table_agrees_with_plain_dicts_and_every_request_gets_its_adapter(seed: int) -> None:
    model = run_random_operations(seed, 1200)
    assert not any(slot.num_rows for slot in model.queue.table.slots)
    assert model.queue.progress().num_waiting == 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_table_agrees_with_plain_dicts_for_a_long_time() -> None:
    for seed in range(100, 200):
        run_random_operations(seed, 3000)


def test_the_slot_with_the_fewest_rows_is_closed() -> None:
    model = Model(num_slots=2, max_rows=5)
    for adapter in (1, 2):
        model.submit(adapter, 0.0)
    model.schedule()
    for _ in range(2):
        model.answer(Rank(0, 0))
    for adapter in (1, 1):
        model.submit(adapter, 0.0)
    model.schedule()
    model.submit(3, 1.0)
    for _ in range(MAX_OVERTAKES):
        assert model.queue.closed is None
        passing = model.submit(1, 2.0)
        while model.steps:
            model.result()
        model.schedule()
        model.leave(passing, State.FINISHED)
    assert model.queue.closed is not None and model.queue.closed.digest == digest_of(2)
    (last,) = model.running(model.queue.closed.number)
    model.leave(last, State.FINISHED)
    assert not model.schedule(), "a step with its row is in flight"
    model.result()
    model.result()
    (fill,) = model.schedule()
    assert fill.digest == digest_of(3) and fill.slot == 2 and model.fill_waits[-1] == MAX_OVERTAKES


def test_a_core_adopts_an_adapter_once_and_only_into_its_own_slots() -> None:
    contents = [(1, 7), (2, 7), (3, 8), (4, 9)]
    table = AdapterTable(3, [Rank(0, 0)])
    table.adopt([SlotContent(slot=slot, digest=digest_of(adapter)) for slot, adapter in contents])
    assert [(slot.state, slot.digest) for slot in table.slots] == [
        (SlotState.READY, digest_of(7)),
        (SlotState.EMPTY, b""),
        (SlotState.READY, digest_of(8)),
    ]
    table.check_invariants([])


def test_an_illegal_move_of_a_slot_raises_and_changes_nothing() -> None:
    for state, other in itertools.product(SlotState, SlotState):
        slot = AdapterSlot(1, state)
        if (state, other) in LEGAL_MOVES:
            slot.move(other)
            assert slot.state is other
        else:
            with pytest.raises(AssertionError, match=f"slot 1: {state.name} → {other.name} is not a legal move"):
                slot.move(other)
            assert slot.state is state
