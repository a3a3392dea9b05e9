"""Blocks move between the KV cache and the arena as numpy arrays would, in the order of the steps."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.workers import RowSampling, SchedulerOutput
from tokenloom.ipc.process.arena import Arena, ArenaShape, new_arena
from tokenloom.tests.workers.device.fake_device import DeviceHistoryModel, FakeRecorder
from tokenloom.tests.workers.history_model import HistoryModel
from tokenloom.tests.workers.random_schedule import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    execute,
    expected_tokens,
    frame,
    message,
    new_row,
    sampled_by,
)
from tokenloom.workers.device.device_runner import DeviceRunner
from tokenloom.workers.device.token_copy import PendingCopy
from tokenloom.workers.features.kv_copies.kv_copies import KVCopies
from tokenloom.workers.machine.parallel import NullGroup, ParallelGroup
from tokenloom.workers.model_runner import ModelRunner
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.kv_cache import KVCacheSpec
from tokenloom.workers.step.runner_feature import BegunStep

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: 32-bit words wrap in the interpreter

NUM_SLOTS = 7
GREEDY = RowSampling(temperature=0.0)


def new_arena_of(slot_bytes: int) -> Arena:
    shape = ArenaShape(NUM_SLOTS, (1,), (slot_bytes,))
    fd = new_arena()
    Arena.resize(fd, shape)
    return Arena(fd, shape)


def bytes_of(kv_cache: torch.Tensor) -> torch.Tensor:
    """The blocks of a group that has the whole pool, as KVPool has them."""
    return kv_cache.view(torch.uint8).flatten(1)


def copies_of(stores: list[int], loads: list[int], step: SchedulerOutput | None = None) -> SchedulerOutput:
    """A step that also has these pairs (block, slot) and (slot, block)."""
    return msgspec.structs.replace(step or message(), stores=frame(*stores), loads=frame(*loads))


def begun_with(copies: KVCopies, step: SchedulerOutput) -> None:
    copies.begin(step, BegunStep(lambda stage: None))


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.int8, torch.uint8])
def kv_cache(request: pytest.FixtureRequest) -> torch.Tensor:
    cache = KVCacheSpec(3, 2, 8, 4, request.param).allocate(9, torch.device("cpu"))
    cache.view(torch.uint8).copy_(torch.randint(0, 256, cache.view(torch.uint8).shape, dtype=torch.uint8))
    return cache


@pytest.mark.parametrize(("rank", "local_ranks"), [(0, [0, 1]), (1, [0, 1]), (3, [2, 3])])
def test_random_copies_equal_those_of_numpy_arrays(kv_cache: torch.Tensor, rank: int, local_ranks: list[int]) -> None:
    rng = np.random.default_rng(rank)
    block_bytes = kv_cache[0].numel() * kv_cache.itemsize
    arena = new_arena_of(2 * block_bytes)
    copies = KVCopies(arena, [bytes_of(kv_cache)], NullGroup(rank, 4), local_ranks)
    bytes_of_cache = kv_cache.view(torch.uint8).flatten(1).numpy()
    blocks = bytes_of_cache.copy()
    slots = np.zeros((NUM_SLOTS, 2 * block_bytes), np.uint8)
    place = local_ranks.index(rank)
    mine = slice(place * block_bytes, (place + 1) * block_bytes)
    for _ in range(60):
        computed = int(rng.integers(1, 9))  # as a step's forward pass writes
        bytes_of_cache[computed] = blocks[computed] = rng.integers(0, 256, block_bytes)
        stores = [(int(rng.integers(1, 9)), int(rng.integers(1, NUM_SLOTS + 1))) for _ in range(rng.integers(0, 5))]
        loads = [(int(rng.integers(1, NUM_SLOTS + 1)), int(rng.integers(1, 9))) for _ in range(rng.integers(0, 5))]
        for block, slot in stores:
            slots[slot - 1, mine] = blocks[block]
        for slot, block in loads:
            blocks[block] = slots[slot - 1, mine]
        begun_with(copies, copies_of([id for pair in stores for id in pair], [id for pair in loads for id in pair]))
        np.testing.assert_array_equal(bytes_of_cache, blocks)
        for slot in range(1, NUM_SLOTS + 1):
            np.testing.assert_array_equal(np.frombuffer(arena.slot(slot), np.uint8), slots[slot - 1])
    assert slots[:, mine].any() and not np.delete(slots, np.r_[mine], axis=1).any()


@pytest.mark.parametrize(
    ("stores", "loads", "words"),
    [
        ([8, 1, 9, 1], [], r"blocks 8 to 9 are not all in \[1, 8\]"),
        ([0, 1], [], r"blocks 0 to 0"),  # the null block
        ([1, 0], [], r"slots 0 to 0 are not all in \[1, 7\]"),
        ([1, 1], [8, 1], r"slots 1 to 8"),
        ([1, 1], [1, -1], r"blocks -1 to 1"),
        ([1], [], "stores holds 4 bytes, which make no pairs"),
        ([], [1, 2, 3], "loads holds 12 bytes"),
    ],
)
def test_a_step_with_an_id_out_of_range_copies_nothing(stores: list[int], loads: list[int], words: str) -> None:
    cache = torch.ones(9, 1, 2, 1, 4, 1)
    arena = new_arena_of(cache[0].numel() * 4)
    with pytest.raises(ProtocolError, match=words):
        begun_with(KVCopies(arena, [bytes_of(cache)], ParallelGroup(), [0]), copies_of(stores, loads))
    assert cache.eq(1).all() and not np.frombuffer(arena.memory, np.uint8).any()


def test_an_arena_for_other_blocks_is_refused() -> None:
    with pytest.raises(ProtocolError, match="1 blocks of 32 bytes are no slot of 64"):
        KVCopies(new_arena_of(64), [bytes_of(torch.ones(9, 1, 2, 1, 4, 1))], ParallelGroup(), [0])


class Runner(ModelRunner):
    """A runner of the history model with an arena, on the host or on the fake device."""

    def __init__(self, has_device: bool, pending: PendingCopy | None = None) -> None:
        batch = InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, [NUM_BLOCKS])
        self.cache, group = torch.zeros(NUM_BLOCKS, 1, 2, 1, BLOCK_SIZE, 1), ParallelGroup()
        model = DeviceHistoryModel() if has_device else HistoryModel()
        device = None
        if has_device:
            limits = (MAX_NUM_SEQS, MAX_MODEL_LEN)
            device = DeviceRunner(model, [self.cache], *limits, group, FakeRecorder(), sizes_at_start=(1,))
        copies = LateCopies(new_arena_of(2 * BLOCK_SIZE * 4), [bytes_of(self.cache)], group, [0])
        copies.pending = pending
        super().__init__(model, batch, [self.cache], group, device_runner=device, features=[copies])


class LateCopies(KVCopies):
    """Copies that end when `pending` says so."""

    pending: PendingCopy | None

    def begin(self, step: SchedulerOutput, begun: BegunStep) -> None:
        super().begin(step, begun)
        begun.pending = self.pending


def test_stores_take_what_earlier_steps_in_flight_write_and_not_what_their_own_step_writes() -> None:
    runner, prompt = Runner(has_device=True), [5, 6, 7, 8]
    runner.start(message([0], [4], [], [new_row(0, prompt)], [0, 0, 3, 0, 0, 4]))
    runner.start(copies_of([3, 1], []))  # copies alone, while a step is in flight
    other = message([1], [4], [0], [new_row(1, [20, 21, 22, 23])], [1, 0, 3, 1, 0, 4])
    runner.start(copies_of([3, 2], [], other))
    outputs = [sampled_by(runner.finish()) for _ in range(3)]
    assert [each.rows for each in outputs] == [[0], [], [1]]
    step = message([2], [1], [1], [new_row(2, [*prompt, 1], computed=4)], [2, 0, 5, 2, 0, 6])
    assert execute(runner, copies_of([], [2, 5], step)).token_ids == expected_tokens([*prompt, 1], GREEDY, 1)


class LateCopy(PendingCopy):
    def __init__(self) -> None:
        super().__init__(None, torch.device("cpu"))
        self.has_ended, self.num_waits = False, 0

    @property
    def is_here(self) -> bool:
        return self.has_ended

    def wait(self) -> None:
        self.num_waits += 1
        self.has_ended = True


@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("has_device", [False, True])
def test_a_result_waits_for_the_copies_of_its_step(has_rows: bool, has_device: bool) -> None:
    late = LateCopy()
    runner = Runner(has_device, late)
    step = message([0], [3], [], [new_row(0, [5, 6, 7])], [0, 0, 9]) if has_rows else message()
    copy = runner.start(copies_of([1, 1], [], step))
    assert copy is not None and not runner.is_next_done
    late.has_ended = True
    assert runner.is_next_done and late.num_waits == 0
    late.has_ended = False
    runner.finish()
    assert late.num_waits == 1
    runner.start(copies_of([1, 1], []))
    runner.clear()  # for a new core, which gives the slots to others
    assert late.num_waits == 2


def test_copies_without_an_arena_are_refused() -> None:
    runner = ModelRunner(HistoryModel(), InputBatch(2, 8, 4, [9]), [torch.zeros(9, 1, 2, 1, 4, 1)], ParallelGroup())
    with pytest.raises(ProtocolError, match="there is no arena"):
        runner.start(copies_of([1, 1], []))
    assert runner.stage == "begin"


class FirstOfTwo(NullGroup):
    """Rank 0, which lets rank 1 run a step while it waits for it."""

    def __init__(self, let_other_run: Callable[[], object]) -> None:
        super().__init__(0, 2)
        self._let_other_run = let_other_run

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._let_other_run()
        return x


def test_both_ranks_write_their_parts_before_the_first_reports_a_step_without_rows() -> None:
    arena, step = new_arena_of(64), copies_of([3, 1], [])

    def run(group: ParallelGroup) -> None:
        kv_cache = torch.full((9, 1, 2, 1, 4, 1), group.rank + 1.0)
        copies = KVCopies(arena, [bytes_of(kv_cache)], group, range(group.size))
        ModelRunner(HistoryModel(), InputBatch(2, 8, 4, [9]), [kv_cache], group, features=[copies]).execute(step)

    run(FirstOfTwo(lambda: run(NullGroup(1, 2))))
    assert np.frombuffer(arena.slot(1), np.float32).tolist() == [1.0] * 8 + [2.0] * 8
