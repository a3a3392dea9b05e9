"""A worker process fills slots beside its steps, and refuses rows in slots of unknown content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tokenloom.ipc.adapters.digest import adapter_digest
from tokenloom.ipc.messages.adapter import FillSlot, SlotContent
from tokenloom.ipc.messages.base import Rank
from tokenloom.ipc.messages.workers import (
    NewRow,
    Probe,
    ProbeAck,
    RowSampling,
    SchedulerOutput,
    SlotFilled,
)
from tokenloom.scripts.make_adapter import AdapterShape, write_adapter
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.workers.random_schedule import new_row
from tokenloom.tests.workers.worker_harness import GENERATION, WorkerHarness, make_spec

GREEDY = RowSampling(temperature=0.0)
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84]
LORA: dict[str, int] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    return tiny_checkpoint(folder, hidden_size=128, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def orders(checkpoint: Path) -> list[FillSlot]:
    """Orders to fill slot i with the i-th adapter."""
    folders = [write_adapter(checkpoint.parent / f"a{i}", checkpoint, AdapterShape(rank=4), i) for i in range(3)]
    return [FillSlot(slot=i, digest=adapter_digest(each), folder=str(each)) for i, each in enumerate(folders, 1)]


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerHarness]:
    """One worker for all tests that do not end it, in a thread."""
    harness = WorkerHarness(make_spec(checkpoint, tmp_path_factory.mktemp("run"), **LORA), in_thread=True)
    try:
        harness.start()
        yield harness
    finally:
        harness.close()


@pytest.fixture
def core(running: WorkerHarness) -> WorkerHarness:
    """A new core; the slots stay as they are."""
    running.new_core()
    running.fills.clear()
    return running


def with_fills(step: SchedulerOutput, *orders: FillSlot) -> SchedulerOutput:
    return msgspec.structs.replace(step, fills=list(orders))


def with_slot(row: NewRow, slot: int) -> NewRow:
    return msgspec.structs.replace(row, adapter_slot=slot)


def filled(core: WorkerHarness, *orders: FillSlot) -> list[SlotFilled]:
    """Fill slots in a step without rows; return the replies of all ranks."""
    core.execute(with_fills(core.next_step([], []), *orders))
    replies = [core.receive(SlotFilled) for _ in range(len(orders) * core.size)]
    assert not any(reply.error for reply in replies)
    return replies


def slots_of(core: WorkerHarness) -> list[SlotContent]:
    return core.acks[Rank(0, 0)].slots


def contents(*orders: FillSlot) -> list[SlotContent]:
    return [SlotContent(slot=order.slot, digest=order.digest) for order in orders]


def test_rows_of_several_adapters_get_their_own_tokens(core: WorkerHarness, orders: list[FillSlot]) -> None:
    base = core.generate(PROMPT, 12, GREEDY)
    replies = filled(core, *orders)
    assert [(each.slot, each.digest, each.step, each.core_epoch) for each in replies] == [
        (order.slot, order.digest, core.step, core.epoch) for order in orders
    ]
    answers = [core.generate(PROMPT, 12, GREEDY, slot=slot) for slot in range(4)]
    assert answers[0] == base
    assert len({tuple(answer) for answer in answers}) == 4, "an adapter is too weak to show anything"
    assert [core.generate(PROMPT, 12, GREEDY, chunk=5, slot=slot) for slot in range(4)] == answers
    rows = [with_slot(new_row(row, PROMPT), row) for row in range(4)]
    appends = [value for row in range(4) for block in range(2) for value in (row, 0, 1 + 2 * row + block)]
    together = [core.execute(core.next_step([0, 1, 2, 3], [len(PROMPT)] * 4, rows, appends))]
    together += [core.execute(core.next_step([3, 1, 0, 2], [1] * 4))]
    assert together[0] == [answer[0] for answer in answers]
    assert together[1] == [answers[row][1] for row in (3, 1, 0, 2)]


def test_a_failed_fill_is_named_and_nothing_else_fails(core: WorkerHarness, orders: list[FillSlot]) -> None:
    filled(core, orders[1])
    answer = core.generate(PROMPT, 4, GREEDY, slot=2)
    core.execute(with_fills(core.next_step([], []), msgspec.structs.replace(orders[0], folder="/nowhere")))
    reply = core.receive(SlotFilled)
    assert reply.slot == 1 and reply.error.startswith("/nowhere/")
    other = msgspec.structs.replace(orders[0], digest=b"x" * 32)
    core.execute(with_fills(core.next_step([], []), other))
    assert "has changed since it was stored" in core.receive(SlotFilled).error
    assert core.generate(PROMPT, 4, GREEDY, slot=2) == answer
    core.new_core()
    assert contents(orders[1])[0] in slots_of(core) and 1 not in {each.slot for each in slots_of(core)}


def test_a_new_core_adopts_the_slots_that_are_filled(core: WorkerHarness, orders: list[FillSlot]) -> None:
    filled(core, *orders[:2])
    answer = core.generate(PROMPT, 6, GREEDY, slot=2)
    core.execute(core.next_step([0], [3], [with_slot(new_row(0, PROMPT), 2)], [0, 0, 1, 0, 0, 2]))
    core.new_core()  # the old one is killed within a request
    assert slots_of(core)[:2] == contents(*orders[:2])
    assert core.generate(PROMPT, 6, GREEDY, slot=2) == answer
    core.publish(Probe(core_epoch=core.epoch, generation=GENERATION))
    assert core.receive(ProbeAck).slots == slots_of(core)


def test_a_fill_that_hangs_holds_up_neither_steps_nor_stop(
    orders: list[FillSlot], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENLOOM_FAULTS", str(tmp_path))
    process = WorkerHarness(make_spec(checkpoint, tmp_path, **LORA))
    try:
        process.start()
        answer = process.generate(PROMPT, 4, GREEDY)
        fault = inject(tmp_path, "worker.fill", "hang", rank=0)
        process.execute(with_fills(process.next_step([], []), *orders[:2]))
        wait_until(lambda: not fault.exists(), "the fill hangs")
        assert process.generate(PROMPT, 4, GREEDY) == answer
        assert process.stop() == [0]
    finally:
        process.close()


@pytest.mark.nightly
def test_two_ranks_fill_and_give_the_tokens_of_one(
    core: WorkerHarness, orders: list[FillSlot], checkpoint: Path, tmp_path: Path
) -> None:
    filled(core, *orders[:2])
    expected = [core.generate(PROMPT, 8, GREEDY, slot=slot) for slot in range(3)]
    pair = WorkerHarness(make_spec(checkpoint, tmp_path, tensor_parallel_size=2, **LORA))
    try:
        pair.start()
        replies = filled(pair, *orders[:2])
        assert {(reply.rank.tp, reply.slot) for reply in replies} == {(0, 1), (0, 2), (1, 1), (1, 2)}
        assert [pair.generate(PROMPT, 8, GREEDY, chunk=7, slot=slot) for slot in range(3)] == expected
        pair.new_core()
        assert {rank.tp: ack.slots for rank, ack in pair.acks.items()} == dict.fromkeys((0, 1), contents(*orders[:2]))
        assert pair.stop() == [0, 0]
    finally:
        pair.close()
