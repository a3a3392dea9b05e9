"""A worker with slots refuses orders that would give a row the tokens of another adapter, or of none."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tokenloom.ipc.errors import ConfigError, ProtocolError
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.adapter import FillSlot, SlotContent
from tokenloom.ipc.messages.base import Holding
from tokenloom.ipc.messages.workers import NewRow, RowLogprobs, RowSampling, SchedulerOutput, SlotFilled
from tokenloom.ipc.spec.adapters.digest import adapter_digest
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.scripts.bench.inputs.make_adapter import AdapterShape, write_adapter
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.peft_adapters import KINDS, peft_logits, save_adapter
from tokenloom.tests.support.today import some
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.workers.features.adapters.adapted_model import GatedFiller
from tokenloom.tests.workers.features.adapters.test_adapter_loader import replies_of
from tokenloom.tests.workers.random_schedule import execute, message, new_row
from tokenloom.tests.workers.worker_harness import GREEDY, PROMPT, WorkerHarness, make_spec
from tokenloom.workers.machine.memory import CPU_SHARE
from tokenloom.workers.worker import Worker

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


class Steps:
    """Runs the steps of a worker in this process, on blocks 1 and 2."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def execute(self, step: SchedulerOutput) -> Any:
        assert self.worker.runner is not None
        return execute(self.worker.runner, step)

    def fill(self, *orders: FillSlot) -> list[SlotFilled]:
        self.execute(msgspec.structs.replace(message(), fills=list(orders)))
        return self.replies(len(orders))

    def replies(self, count: int) -> list[SlotFilled]:
        assert self.worker.adapters is not None
        return replies_of(self.worker.adapters, count)

    def generate(self, slot: int, count: int = 8) -> list[int]:
        row = with_slot(new_row(0, PROMPT), slot)
        tokens = self.execute(message([0], [len(PROMPT)], [], [row], [0, 0, 1, 0, 0, 2])).token_ids
        for _ in range(count - 1):
            tokens += self.execute(message([0], [1])).token_ids
        self.execute(message(freed=[0]))
        return list(tokens)


def with_slot(row: NewRow, slot: int) -> NewRow:
    return msgspec.structs.replace(row, adapter_slot=slot)


def started(checkpoint: Path, run_directory: Path, **options: Any) -> Steps:
    worker = Worker(make_spec(checkpoint, run_directory, **{**LORA, **options}), rank=0, generation=0)
    for _ in worker.load():
        pass
    measured = worker.measure()
    worker.initialize(PoolShape.of(measured.pool_bytes, measured.block_bytes))
    return Steps(worker)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def orders(checkpoint: Path) -> list[FillSlot]:
    return orders_of(checkpoint)


def orders_of(checkpoint: Path) -> list[FillSlot]:
    """Return orders to fill slot i with the i-th adapter."""
    folders = [write_adapter(checkpoint.parent / f"a{i}", checkpoint, AdapterShape(rank=4), i) for i in range(3)]
    return [FillSlot(slot=i, digest=adapter_digest(each), folder=str(each)) for i, each in enumerate(folders, 1)]


@pytest.fixture
def steps(checkpoint: Path, tmp_path: Path) -> Steps:
    return started(checkpoint, tmp_path)


@pytest.mark.parametrize("size", some([1, 2], 1))
def test_processes_fill_slots_beside_their_steps_and_a_new_core_adopts_them(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoint = tiny_checkpoint(tmp_path / "model", **shape)
    orders = orders_of(checkpoint)
    monkeypatch.setenv("TOKENLOOM_FAULTS", str(tmp_path))
    ranks = WorkerHarness(make_spec(checkpoint, tmp_path, tensor_parallel_size=size, **LORA))
    try:
        ranks.start()
        ranks.execute(msgspec.structs.replace(ranks.next_step([], []), fills=orders[:2]))
        replies = [ranks.receive(SlotFilled) for _ in range(2 * size)]
        assert not any(reply.error for reply in replies)
        assert {(each.step, each.core_epoch) for each in replies} == {(ranks.step, ranks.epoch)}
        assert {(each.rank.tp, each.slot) for each in replies} == set(product(range(size), (1, 2)))
        answers = [ranks.generate(PROMPT, 4, GREEDY, chunk=7, slot=slot) for slot in range(3)]
        row = with_slot(new_row(0, PROMPT), 2)
        ranks.execute(ranks.next_step([0], [3], [row], [0, 0, 1, 0, 0, 2]))
        ranks.new_core()  # the old one is killed within a request
        contents = [SlotContent(slot=order.slot, digest=order.digest) for order in orders[:2]]
        assert [ack.slots for ack in ranks.acks.values()] == [contents] * size
        fault = inject(tmp_path, "worker.fill", "hang", rank=0)
        ranks.execute(msgspec.structs.replace(ranks.next_step([], []), fills=orders[2:]))
        wait_until(lambda: not fault.exists(), "the fill hangs")
        assert [ranks.generate(PROMPT, 4, GREEDY, slot=slot) for slot in range(3)] == answers
        assert ranks.stop() == [0] * size
    finally:
        ranks.close()


@pytest.mark.nightly
def test_two_ranks_fill_and_give_the_tokens_of_one(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoint = tiny_checkpoint(tmp_path / "model", **shape)
    orders, one = orders_of(checkpoint)[:2], started(checkpoint, tmp_path)
    assert not any(reply.error for reply in one.fill(*orders))
    expected = [one.generate(slot) for slot in range(3)]
    assert len(set(map(tuple, expected))) == 3, "an adapter is too weak to show anything"
    pair = WorkerHarness(make_spec(checkpoint, tmp_path, tensor_parallel_size=2, **LORA))
    try:
        pair.start()
        pair.execute(msgspec.structs.replace(pair.next_step([], []), fills=orders))
        assert not any(pair.receive(SlotFilled).error for _ in range(4))
        assert [pair.generate(PROMPT, 8, GREEDY, chunk=7, slot=slot) for slot in range(3)] == expected
        assert pair.stop() == [0, 0]
    finally:
        pair.close()


@pytest.mark.parametrize("slot", [1, 4, -1])
def test_a_row_is_not_admitted_to_a_slot_that_is_not_filled(steps: Steps, orders: list[FillSlot], slot: int) -> None:
    rows = [with_slot(new_row(0, PROMPT), slot)]
    step = message([0], [len(PROMPT)], [], rows, [0, 0, 1, 0, 0, 2])
    fills = orders[:1] if slot == 1 else []  # in the same step is too late
    with pytest.raises(ProtocolError, match=f"adapter slot {slot}, "):
        steps.execute(msgspec.structs.replace(step, fills=fills))


def test_a_slot_is_not_filled_while_a_row_uses_it(steps: Steps, orders: list[FillSlot]) -> None:
    steps.fill(orders[0])
    rows, appends = [with_slot(new_row(2, PROMPT), 1)], [2, 0, 1, 2, 0, 2]
    steps.execute(message([2], [3], [], rows, appends))
    freed = msgspec.structs.replace(message(freed=[2]), fills=[orders[0]])  # freed in the same step: allowed
    steps.execute(freed)
    assert steps.replies(1)[0].error == ""
    steps.execute(message([2], [3], [], rows, appends))
    with pytest.raises(ProtocolError, match="fills adapter slot 1, row 2 uses it"):
        steps.execute(msgspec.structs.replace(message([2], [1]), fills=[orders[0]]))


def test_a_worker_without_slots_takes_no_fills_and_no_slots(
    checkpoint: Path, tmp_path: Path, orders: list[FillSlot]
) -> None:
    steps = started(checkpoint, tmp_path, enable_lora=False)
    assert steps.worker.adapters is None
    with pytest.raises(ProtocolError, match="--enable-lora is not set"):
        steps.execute(msgspec.structs.replace(message(), fills=orders))
    with pytest.raises(ProtocolError, match=r"adapter slot 1, slots are \[1, 0\]"):
        steps.execute(message([], [], [], [with_slot(new_row(0, PROMPT), 1)]))


def test_slots_that_nobody_uses_leave_the_tokens_as_they_are(
    steps: Steps, checkpoint: Path, tmp_path: Path, orders: list[FillSlot]
) -> None:
    plain = started(checkpoint, tmp_path / "plain", enable_lora=False)
    steps.fill(*orders)
    assert steps.generate(0, 13) == plain.generate(0, 13)
    assert len({tuple(steps.generate(slot)) for slot in range(4)}) == 4


def test_other_weights_empty_the_slots_and_a_sleeping_cache_keeps_them(
    steps: Steps, orders: list[FillSlot], checkpoint: Path
) -> None:
    worker = steps.worker
    assert worker.adapters is not None
    steps.fill(*orders[:2])
    answer = steps.generate(1)
    worker.hold(Holding(asleep=["kv_cache"]))
    worker.hold(Holding())
    assert steps.generate(1) == answer
    gate = GatedFiller()
    worker.adapters.use(gate)  # type: ignore[arg-type]
    gate.close()
    steps.execute(msgspec.structs.replace(message(), fills=[orders[2]]))
    gate.wait_for_fill()
    worker.hold(Holding(model_folder=str(checkpoint)))
    (reply,) = steps.replies(1)
    gate.open()
    assert reply.slot == 3 and "weights were replaced" in reply.error
    for holding in (Holding(asleep=["weights", "kv_cache"]), None):
        assert worker.adapters.contents == []
        steps.fill(orders[0])
        assert steps.generate(1) == answer
        if holding is not None:
            worker.hold(holding)
            assert worker.adapters.contents == []
            worker.hold(Holding())


def test_a_fill_under_a_lost_core_counts_for_the_core_after_the_next(steps: Steps, orders: list[FillSlot]) -> None:
    adapters, gate = steps.worker.adapters, GatedFiller()
    assert adapters is not None
    adapters.use(gate)  # type: ignore[arg-type]
    steps.fill(*orders)
    gate.close()
    changed = msgspec.structs.replace(orders[2], slot=1)
    steps.execute(msgspec.structs.replace(message(), fills=[changed]))
    gate.wait_for_fill()
    steps.worker.reset()
    assert [each.slot for each in adapters.contents] == [2, 3], "slot 1 is unknown"
    gate.open()
    replies = list[SlotFilled]()
    wait_until(lambda: replies.extend(adapters.take()) or len(adapters.contents) == 3, "the fill under way ends")
    assert [each.digest for each in adapters.contents] == [orders[2].digest, orders[1].digest, orders[2].digest]
    assert not replies, "no core gets the reply to another's order"


def test_a_reloaded_base_gives_the_norms_of_dora(checkpoint: Path, tmp_path: Path) -> None:
    """An adapter trained on one base is loaded on another, with rows of other lengths."""
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    adapter = save_adapter(tmp_path / "adapter", checkpoint, KINDS["dora"], 1)
    order = FillSlot(slot=1, digest=adapter_digest(adapter), folder=str(adapter))
    steps, fresh = started(checkpoint, tmp_path / "run"), started(other, tmp_path / "fresh")
    steps.fill(order)
    before = steps.generate(1)
    steps.worker.hold(Holding(model_folder=str(other)))
    steps.fill(order)
    fresh.fill(order)
    assert steps.generate(1) == fresh.generate(1) != before


def test_scores_of_a_prompt_are_its_adapters(checkpoint: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", checkpoint, KINDS["embedding and head"], 1)
    steps = started(checkpoint, tmp_path)
    steps.fill(FillSlot(slot=2, digest=adapter_digest(adapter), folder=str(adapter)))
    sampling = RowSampling(temperature=0.0, num_prompt_logprobs=0, num_logprobs=0)
    rows = [with_slot(new_row(row, PROMPT, 0, sampling), slot) for row, slot in ((0, 0), (1, 2))]
    sampled = steps.execute(message([0, 1], [len(PROMPT)] * 2, [], rows, [0, 0, 1, 0, 0, 2, 1, 0, 3, 1, 0, 4]))
    for row, folder in ((0, None), (1, adapter)):
        expected = peft_logits(checkpoint, folder, {"a": PROMPT})["a"].log_softmax(-1)
        scored = expected[range(len(PROMPT) - 1), PROMPT[1:]].numpy()
        np.testing.assert_allclose(logprobs_of(sampled.prompt_logprobs, row), scored, atol=2e-4)
        np.testing.assert_allclose(logprobs_of(sampled.logprobs, row), [expected[-1].max().item()], atol=2e-4)


def logprobs_of(found: RowLogprobs, row: int) -> list[float]:
    rows = np.frombuffer(found.rows, np.int32)
    return [float(value) for value in np.frombuffer(found.logprobs, np.float32)[rows == row]]


def test_dummy_weights_take_adapters(checkpoint: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", checkpoint, KINDS["dora"], 1)
    steps = started(checkpoint, tmp_path, load_format="dummy")
    (reply,) = steps.fill(FillSlot(slot=1, digest=adapter_digest(adapter), folder=str(adapter)))
    assert reply.error == "" and steps.generate(1) != steps.generate(0)


def test_slots_take_their_memory_from_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    def measure(**options: Any) -> tuple[int, int]:
        """Return the bytes of all blocks and of all slots."""
        limits = {"num_kv_blocks": None, "max_num_seqs": 1000}
        worker = Worker(
            make_spec(checkpoint, tmp_path, **{**LORA, **limits, **options}), 0, 0, available=lambda: 4 << 20
        )
        for _ in worker.load():
            pass
        measured = worker.measure()
        return measured.pool_bytes, worker.adapters.num_bytes if worker.adapters else 0

    with_slots, slot_bytes = measure(max_lora_rank=32)
    without, _ = measure(enable_lora=False)
    assert slot_bytes > 1 << 20
    assert without - with_slots == pytest.approx(slot_bytes * CPU_SHARE, abs=50_000)
    with pytest.raises(ConfigError, match=r"take 23\.\d MiB on each rank, 4\.0 MiB is free: lower --max-loras or"):
        measure(max_lora_rank=512)


def test_transformers_layers_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    spec = make_spec(checkpoint, tmp_path, **LORA)
    spec = msgspec.structs.replace(spec, model=load_model_config(checkpoint, implementation="transformers"))
    with pytest.raises(ConfigError, match="--enable-lora serves models with layers of this engine"):
        list(Worker(spec, 0, 0).load())
