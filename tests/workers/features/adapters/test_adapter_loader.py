"""A slot's content is known if and only if its last order is filled; every order of a living core gets one reply."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.adapter import FillSlot, SlotContent
from tokenloom.ipc.messages.base import Rank
from tokenloom.ipc.messages.workers import SlotFilled
from tokenloom.ipc.process.pacer import Pause
from tokenloom.ipc.spec.adapters.digest import adapter_digest
from tokenloom.scripts.bench.inputs.make_adapter import AdapterShape, write_adapter
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.shortages import few_threads
from tokenloom.tests.support.waiting import WAIT_S, wait_until
from tokenloom.tests.workers.features.adapters.adapted_model import GatedFiller, load_adaptable
from tokenloom.tests.workers.random_schedule import message
from tokenloom.workers.features.adapters.adapter_loader import LULL_S, AdapterLoader
from tokenloom.workers.features.adapters.slot_filler import SlotFiller

NUM_SLOTS = 5


class Case(NamedTuple):
    checkpoint: Path
    adapters: list[Path]
    digests: list[bytes]

    def filler(self) -> SlotFiller:
        return load_adaptable(self.checkpoint)[1]

    def order(self, slot: int, adapter: int) -> FillSlot:
        return FillSlot(slot=slot, digest=self.digests[adapter], folder=str(self.adapters[adapter]))

    def content(self, slot: int, adapter: int) -> SlotContent:
        return SlotContent(slot=slot, digest=self.digests[adapter])


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("loader")
    checkpoint = tiny_checkpoint(folder / "model")
    adapters = [write_adapter(folder / f"a{i}", checkpoint, AdapterShape(rank=2), i) for i in range(3)]
    return Case(checkpoint, adapters, [adapter_digest(each) for each in adapters])


@pytest.fixture
def gate(case: Case) -> GatedFiller:
    return GatedFiller(case.filler())


@pytest.fixture
def loader(gate: GatedFiller) -> AdapterLoader:
    return loader_with(gate)


def loader_with(filler: object, **clock: Callable[..., Any]) -> AdapterLoader:
    loader = AdapterLoader(Rank(0, 0), NUM_SLOTS, **clock)
    loader.use(filler)  # type: ignore[arg-type]
    loader.take()
    return loader


def start(loader: AdapterLoader, order: FillSlot, step: int = 1, epoch: int = 0) -> None:
    loader.start(order, msgspec.structs.replace(message(), step=step, core_epoch=epoch))


def replies_of(loader: AdapterLoader, count: int) -> list[SlotFilled]:
    """Wait for so many replies."""
    replies = list[SlotFilled]()

    def has_all() -> bool:
        loader.wait(1.0)
        replies.extend(loader.take())
        return len(replies) >= count

    wait_until(has_all, "replies of all orders")
    return replies


def test_a_failed_fill_is_one_reply_and_leaves_the_slot_unknown(
    loader: AdapterLoader, case: Case, gate: GatedFiller
) -> None:
    start(loader, case.order(1, 0))
    replies_of(loader, 1)
    for error in (RuntimeError("it broke"), MemoryError("all")):
        gate.errors.append(error)
        start(loader, case.order(2, 1))
        (reply,) = replies_of(loader, 1)
        assert reply.error == f"{type(error).__name__}: {error}"
        assert loader.contents == [case.content(1, 0)]
    missing = msgspec.structs.replace(case.order(3, 1), folder="/nowhere")
    start(loader, missing)
    (reply,) = replies_of(loader, 1)
    assert reply.error.startswith("/nowhere/adapter_config.json")
    start(loader, case.order(2, 1))
    assert replies_of(loader, 1)[0].error == ""
    assert loader.contents == [case.content(1, 0), case.content(2, 1)]


def test_two_orders_of_a_slot_make_it_known_after_the_last(
    loader: AdapterLoader, case: Case, gate: GatedFiller
) -> None:
    start(loader, case.order(1, 0), step=1)
    replies = replies_of(loader, 1)
    gate.close()
    start(loader, case.order(1, 1), step=2)
    start(loader, case.order(2, 2), step=3)
    start(loader, case.order(1, 2), step=4)
    gate.wait_for_fill()
    assert loader.contents == []
    gate.open()
    while len(replies) < 4:
        replies += replies_of(loader, 1)
        assert case.content(1, 1) not in loader.contents and case.content(1, 0) not in loader.contents
    assert [each.step for each in replies] == [1, 2, 3, 4]
    assert loader.contents == [case.content(1, 2), case.content(2, 2)]


def test_an_order_for_the_slot_of_an_old_fill_under_way_wins(
    loader: AdapterLoader, case: Case, gate: GatedFiller
) -> None:
    gate.close()
    start(loader, case.order(1, 0), step=5, epoch=1)
    gate.wait_for_fill()
    loader.forget_orders()
    start(loader, case.order(1, 1), step=1, epoch=2)
    gate.open()
    (reply,) = replies_of(loader, 1)
    assert (reply.digest, loader.contents) == (case.digests[1], [case.content(1, 1)])


def test_slots_out_of_range_are_refused(loader: AdapterLoader, case: Case) -> None:
    for slot in (0, -1, NUM_SLOTS + 1):
        with pytest.raises(ProtocolError, match=rf"fills adapter slot {slot}, slots are \[1, 5\]"):
            start(loader, case.order(slot, 0))


def test_the_thread_alone_has_one_compute_thread(loader: AdapterLoader, case: Case, gate: GatedFiller) -> None:
    torch.set_num_threads(3)
    gate.close()
    before = set(threading.enumerate())
    start(loader, case.order(1, 0))
    gate.wait_for_fill()
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    seen = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [3, 3]
    gate.open()
    replies_of(loader, 1)
    assert gate.num_threads == 1


class Working:
    """A filler that takes CPU time."""

    def fill(self, order: FillSlot, pause: Pause) -> int:
        for _ in range(20):
            until = time.thread_time() + 0.002
            while time.thread_time() < until:
                pass
            pause()
        return 0


class Busyness:
    """A filler that notes at each pause whether fills rest."""

    def __init__(self) -> None:
        self.loader: AdapterLoader
        self.seen = SimpleQueue[bool]()
        self.goes_on = threading.Semaphore(0)

    def fill(self, order: FillSlot, pause: Pause) -> int:
        for _ in range(3):
            self.goes_on.acquire()
            pause()
            self.seen.put(self.loader.is_beside_steps)
        return 0

    def look(self) -> bool:
        """Let the fill take a step; return the state that it found."""
        self.goes_on.release()
        return self.seen.get(timeout=10 * WAIT_S)


def test_fills_rest_less_the_more_adapters_wait(case: Case) -> None:
    rests_s = []
    for num_waiting in (1, 6):
        rests = list[float]()

        def sleep(seconds: float, rests: list[float] = rests) -> None:
            rests.append(seconds)
            threading.Event().wait(seconds)

        loader = loader_with(Working(), sleep=sleep)
        with loader.beside_step():
            start(loader, msgspec.structs.replace(case.order(1, 0), num_waiting=num_waiting))
            replies_of(loader, 1)
        rests_s.append(sum(rests))
    assert 0 < rests_s[1] < 0.5 * rests_s[0]


def test_fills_rest_beside_steps_and_not_once_these_have_ended(case: Case) -> None:
    now, filler = [100.0], Busyness()
    loader = filler.loader = loader_with(filler, monotonic=lambda: now[0])
    assert not loader.is_beside_steps
    with loader.beside_step():
        start(loader, case.order(1, 0))
        now[0] += 10 * LULL_S  # a long step
        assert filler.look()
    now[0] += LULL_S / 2  # the next step is about to come
    assert filler.look()
    now[0] += LULL_S
    assert not filler.look()
    (reply,) = replies_of(loader, 1)
    assert not reply.error


def test_without_a_thread_an_order_fails_and_the_next_one_is_filled(loader: AdapterLoader, case: Case) -> None:
    with few_threads():
        start(loader, case.order(1, 0))
        (reply,) = replies_of(loader, 1)
    assert "can't start new thread" in reply.error and loader.contents == []
    start(loader, case.order(1, 0))
    (reply,) = replies_of(loader, 1)
    assert not reply.error and loader.contents == [case.content(1, 0)]
