"""Whatever the schedule, each row gets the tokens that it would get alone."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages import NewRow, RowSampling, SchedulerOutput
from tokenloom.tests.workers.history_model import VOCAB_SIZE, HistoryModel, logits_after
from tokenloom.workers.input_batch import InputBatch
from tokenloom.workers.model_runner import ModelRunner
from tokenloom.workers.parallel import ParallelGroup
from tokenloom.workers.sampler import Sampler
from tokenloom.workers.sampling_columns import SamplingColumns

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 8, 64, 4, 129
CPU = torch.device("cpu")


def new_runner(group: ParallelGroup | None = None) -> ModelRunner:
    batch = InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS)
    kv_cache = torch.zeros(NUM_BLOCKS, 1, 2, 1, BLOCK_SIZE, 1)
    return ModelRunner(HistoryModel(), batch, kv_cache, group or ParallelGroup())


def frame(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def message(
    rows: list[int] | None = None,
    counts: list[int] | None = None,
    freed: list[int] | None = None,
    new_rows: list[NewRow] | None = None,
    appends: list[int] | None = None,
    undrawn: list[int] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        step=1,
        core_epoch=0,
        generation=0,
        rows=frame(*rows or []),
        counts=frame(*counts or []),
        freed_rows=frame(*freed or []),
        new_rows=new_rows or [],
        block_appends=frame(*appends or []),
        token_appends=frame(*undrawn or []),
    )


def expected_tokens(prompt: list[int], sampling: RowSampling, count: int) -> list[int]:
    """The oracle: each token drawn alone from the logits of its history."""
    columns = SamplingColumns.greedy(1)
    columns.put(0, sampling)
    history = list(prompt)
    for _ in range(count):
        history.append(int(Sampler().sample(logits_after(history), columns, np.array([len(history)]))[0]))
    return history[len(prompt) :]


@dataclass
class Request:
    prompt: list[int]
    sampling: RowSampling
    limit: int
    outputs: list[int] = field(default_factory=list)
    row: int | None = None
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)


class RandomSchedule:
    """Admits, chunks, interleaves and preempts at random; what a core may do, without its policy."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.free_blocks = list(range(1, NUM_BLOCKS))
        self.requests = [self._request() for _ in range(20)]

    def _request(self) -> Request:
        prompt = self.rng.integers(0, VOCAB_SIZE, self.rng.integers(1, 40)).tolist()
        temperature = float(self.rng.choice([0.0, 0.7, 1.3]))
        top_k, top_p = int(self.rng.choice([0, 20])), float(self.rng.choice([1.0, 0.9]))
        sampling = RowSampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=int(self.rng.integers(1 << 40)))
        return Request(prompt, sampling, int(self.rng.integers(1, MAX_MODEL_LEN - len(prompt) + 1)))

    @property
    def open(self) -> list[Request]:
        return [request for request in self.requests if len(request.outputs) < request.limit]

    def step(self) -> SchedulerOutput:
        freed = self._free()
        new_rows = self._admit()
        running = [request for request in self.open if request.row is not None and self.rng.random() < 0.8]
        rows, counts, appends = list[int](), list[int](), list[int]()
        for index in self.rng.permutation(len(running)):
            request = running[index]
            count = int(self.rng.integers(1, request.num_tokens - request.num_computed + 1))
            while len(request.blocks) * BLOCK_SIZE < request.num_computed + count:
                request.blocks.append(self.free_blocks.pop(int(self.rng.integers(len(self.free_blocks)))))
                appends += [request.row or 0, 0, request.blocks[-1]]
            request.num_computed += count
            rows.append(request.row or 0)
            counts.append(count)
        return message(rows, counts, freed, new_rows, appends)

    def _free(self) -> list[int]:
        freed = []
        for request in self.requests:
            is_done = len(request.outputs) == request.limit
            if request.row is not None and (is_done or self.rng.random() < 0.05):  # finished or preempted
                freed.append(request.row)
                self.free_blocks += request.blocks
                request.row, request.num_computed, request.blocks = None, 0, []
        return freed

    def _admit(self) -> list[NewRow]:
        new_rows = []
        for row in set(range(MAX_NUM_SEQS)) - {request.row for request in self.requests}:
            waiting = [request for request in self.open if request.row is None]
            if waiting and self.rng.random() < 0.5:
                request = waiting[0]
                request.row = row
                tokens = frame(*request.prompt, *request.outputs)
                new_rows.append(
                    NewRow(
                        row=row,
                        token_ids=tokens,
                        num_prompt_tokens=len(request.prompt),
                        num_computed_tokens=0,
                        sampling=request.sampling,
                    )
                )
        return new_rows

    def take(self, rows: list[int], token_ids: list[int]) -> None:
        by_row = {request.row: request for request in self.requests}
        for row, token in zip(rows, token_ids, strict=True):
            by_row[row].outputs.append(token)


@pytest.mark.parametrize("seed", range(6))
def test_tokens_do_not_depend_on_chunks_batches_or_preemption(seed: int) -> None:
    schedule, runner = RandomSchedule(seed), new_runner()
    for _ in range(3000):
        if not schedule.open:
            break
        sampled = runner.execute_model(schedule.step())
        schedule.take(sampled.rows.tolist(), sampled.token_ids.tolist())
    for request in schedule.requests:
        assert request.outputs == expected_tokens(request.prompt, request.sampling, request.limit)


def new_row(row: int, tokens: list[int], computed: int = 0, sampling: RowSampling | None = None) -> NewRow:
    sampling = sampling or RowSampling(temperature=0.0)
    return NewRow(
        row=row,
        token_ids=frame(*tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=computed,
        sampling=sampling,
    )


def test_tokens_that_were_not_drawn_are_computed_together_and_the_next_is_drawn_after_them() -> None:
    runner, sampling = new_runner(), RowSampling(temperature=0.9, seed=5, repetition_penalty=1.5)
    blocks = [each for block in range(1, 9) for each in (3, 0, block)]
    first = runner.execute_model(message([3], [3], new_rows=[new_row(3, [7, 8, 9], 0, sampling)], appends=blocks))
    history, undrawn = [7, 8, 9, int(first.token_ids[0])], [4, 4, 11]
    second = runner.execute_model(message([3], [4], undrawn=[3, 3, *undrawn]))
    alone = new_runner()
    row = NewRow(
        row=0,
        token_ids=frame(*history, *undrawn),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        sampling=sampling,
    )
    expected = alone.execute_model(message([0], [7], new_rows=[row], appends=[0, 0, 1, 0, 0, 2]))
    assert second.token_ids.tolist() == expected.token_ids.tolist()


def test_the_next_step_uses_the_sampled_token_without_being_told_it() -> None:
    runner = new_runner()
    prompt = [5, 6, 7]
    tokens = runner.execute_model(
        message([0], [3], new_rows=[new_row(0, prompt)], appends=[0, 0, 9])
    ).token_ids.tolist()
    for step in range(5):
        appends = [0, 0, 20 + step] if (3 + step) % BLOCK_SIZE == 0 else []
        tokens += runner.execute_model(message([0], [1], appends=appends)).token_ids.tolist()
    assert tokens == expected_tokens(prompt, RowSampling(temperature=0.0), 6)


def test_cached_blocks_are_read_and_not_computed_again() -> None:
    runner = new_runner()
    prompt = list(range(10))
    runner.execute_model(message([0], [10], new_rows=[new_row(0, prompt)], appends=[0, 0, 3, 0, 0, 4, 0, 0, 5]))
    other = [*prompt[:8], 77, 78]
    appends = [1, 0, 3, 1, 0, 4, 1, 0, 6]
    answer = runner.execute_model(message([1], [2], new_rows=[new_row(1, other, computed=8)], appends=appends))
    assert answer.token_ids.tolist() == expected_tokens(other, RowSampling(temperature=0.0), 1)


def test_results_keep_the_order_of_the_message_and_leave_out_rows_that_do_not_sample() -> None:
    runner = new_runner()
    new_rows = [new_row(row, [row] * 4) for row in range(4)]
    appends = [value for row in range(4) for value in (row, 0, row + 1)]
    runner.execute_model(message([0, 1, 2, 3], [3, 1, 3, 2], new_rows=new_rows, appends=appends))
    answer = runner.execute_model(message([1, 3, 0, 2], [3, 1, 1, 1]))
    assert answer.rows.tolist() == [1, 0, 2]
    assert answer.token_ids.tolist() == [
        expected_tokens([row] * 4, RowSampling(temperature=0.0), 1)[0] for row in (1, 0, 2)
    ]


def test_a_step_without_rows_applies_its_changes() -> None:
    runner = new_runner()
    assert len(runner.execute_model(message()).rows) == 0
    assert len(runner.execute_model(message(new_rows=[new_row(3, [1, 2])], appends=[3, 0, 8])).rows) == 0
    assert runner.execute_model(message([3], [2])).rows.tolist() == [3]
    assert len(runner.execute_model(message(freed=[3])).rows) == 0
    with pytest.raises(ProtocolError, match="not in use"):
        runner.execute_model(message([3], [1]))


def test_an_error_names_the_stage_it_came_from() -> None:
    runner = new_runner()
    with pytest.raises(ProtocolError):
        runner.execute_model(message(freed=[1]))
    assert runner.stage == "update rows"
    with pytest.raises(ProtocolError):
        runner.execute_model(message([1], [1]))
    assert runner.stage == "prepare inputs"


def test_a_ragged_frame_of_blocks_is_refused() -> None:
    with pytest.raises(ProtocolError, match="triples"):
        new_runner().execute_model(message(new_rows=[new_row(0, [1])], appends=[0, 0, 1, 0]))


class ThreadGroup(ParallelGroup):
    """Two ranks in two threads of one process."""

    def __init__(self, rank: int, channel: SimpleQueue[Tensor]) -> None:
        super().__init__(rank, 2)
        self._channel = channel

    def broadcast(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            self._channel.put(x.clone())
            return x
        return x.copy_(self._channel.get(timeout=20))


class SilentModel(HistoryModel):
    """Ranks other than 0 see no logits."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return torch.empty(0, VOCAB_SIZE)


def test_every_rank_knows_the_tokens_that_rank_0_drew() -> None:
    channel: SimpleQueue[Tensor] = SimpleQueue()
    batches = [InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS) for _ in range(2)]
    caches = [torch.zeros(NUM_BLOCKS, 1, 2, 1, BLOCK_SIZE, 1) for _ in range(2)]
    models = [HistoryModel(), SilentModel()]
    runners = [ModelRunner(models[rank], batches[rank], caches[rank], ThreadGroup(rank, channel)) for rank in range(2)]
    steps = [message([0], [2], new_rows=[new_row(0, [1, 2], sampling=RowSampling(seed=4))], appends=[0, 0, 1])]
    steps += [message([0], [1]), message([0], [1])]

    def run(rank: int) -> None:
        for step in steps:
            runners[rank].execute_model(step)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert (
        batches[1].token_ids(0) == batches[0].token_ids(0) == [1, 2, *expected_tokens([1, 2], RowSampling(seed=4), 3)]
    )
