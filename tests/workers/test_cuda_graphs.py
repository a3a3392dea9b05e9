"""Decode steps on device-resident rows give the tokens of the plain runner, whatever the schedule.

Everything but the recording of a graph itself: the kernels run in Triton's interpreter, and a recorded step is run
again as it is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tokenloom.tests.kernels.interpreter  # noqa: F401
from tokenloom.ipc.messages import RowSampling
from tokenloom.kernels.ops import AttentionMetadata
from tokenloom.kernels.triton_ops import TritonOps
from tokenloom.tests.checkpoints import tiny_checkpoint
from tokenloom.tests.workers.history_model import HistoryModel
from tokenloom.tests.workers.paged_run import PagedRun, load
from tokenloom.tests.workers.test_model_runner import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    RandomSchedule,
    expected_tokens,
    message,
    new_row,
)
from tokenloom.workers.cuda_graphs import DecodeGraphs, Step, padded_size
from tokenloom.workers.input_batch import InputBatch
from tokenloom.workers.model_runner import Model, ModelRunner
from tokenloom.workers.parallel import ParallelGroup

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: 32-bit words wrap in the interpreter


class Again:
    """Runs the recorded step again: what a graph does, without a GPU."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, step: Step) -> Step:
        def replay() -> None:
            self.num_replays += 1
            step()

        return replay


class DeviceHistoryModel(HistoryModel):
    """Reads lengths on the device, as everything in a graph must; rows of length 0 come last and are padding."""

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        n = int((metadata.seq_lens > 0).sum()) if metadata.num_decode_rows == len(token_ids) else len(token_ids)
        live = replace(
            metadata,
            positions=metadata.positions[:n],
            slots=metadata.slots[:n],
            query_starts_host=metadata.query_starts_host[: len(metadata.seq_lens_host) + 1][: n + 1],
            seq_lens_host=metadata.seq_lens.tolist()[:n],
        )
        hidden = torch.zeros(len(token_ids), 1)
        hidden[:n] = super().forward(token_ids[:n], live, kv_cache)
        return hidden


def new_runner(recorder: Again, model: Model | None = None, kv_cache: Tensor | None = None) -> ModelRunner:
    batch = InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS)
    model = model or DeviceHistoryModel()
    if kv_cache is None:
        kv_cache = torch.zeros(NUM_BLOCKS, 1, 2, 1, BLOCK_SIZE, 1)
    graphs = DecodeGraphs(model, kv_cache, MAX_NUM_SEQS, MAX_MODEL_LEN, recorder, sizes_at_start=(1,))
    return ModelRunner(model, batch, kv_cache, ParallelGroup(), graphs=graphs)


@pytest.mark.parametrize(
    ("seed", "num_requests"), [(0, 3), *(pytest.param(seed, 20, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_tokens_do_not_depend_on_who_runs_the_decode_steps(seed: int, num_requests: int) -> None:
    schedule, recorder = RandomSchedule(seed), Again()
    schedule.requests = schedule.requests[:num_requests]
    runner = new_runner(recorder)
    for _ in range(3000):
        if not schedule.open:
            break
        sampled = runner.execute_model(schedule.step())
        schedule.take(sampled.rows.tolist(), sampled.token_ids.tolist())
    for request in schedule.requests:
        assert request.outputs == expected_tokens(request.prompt, request.sampling, request.limit)
    assert recorder.num_replays > 10


def test_a_row_that_another_request_takes_over_keeps_nothing_of_the_first() -> None:
    recorder = Again()
    runner = new_runner(recorder)
    for prompt, block, seed in (([5, 6, 7], 9, 3), ([70, 71, 72], 11, 4)):
        sampling = RowSampling(seed=seed)
        freed = [0] if seed == 4 else []
        step = message([0], [3], freed, [new_row(0, prompt, sampling=sampling)], [0, 0, block])
        tokens = runner.execute_model(step).token_ids.tolist()
        for i in range(4):
            appends = [0, 0, block + 1] if (3 + i) % BLOCK_SIZE == 0 else []
            tokens += runner.execute_model(message([0], [1], appends=appends)).token_ids.tolist()
        assert tokens == expected_tokens(prompt, sampling, 5)
    assert recorder.num_replays == 8


def test_sizes_grow_by_an_eighth_and_hold_the_rows() -> None:
    for num_rows in range(1, 513):
        size = padded_size(num_rows, 512)
        assert num_rows <= size <= max(num_rows + 3, num_rows * 9 / 8 + 1)
        assert padded_size(size, 512) == size
    assert padded_size(100, 101) == 101
    assert len({padded_size(n, 512) for n in range(1, 513)}) <= 48


@torch.inference_mode()
def test_a_decoder_gives_the_logits_of_the_reference_with_the_kernels_of_a_gpu(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3")
    torch.set_num_threads(1)
    plain, kernels = load(folder), load(folder, ops=TritonOps(90))
    prompt = np.random.default_rng(0).integers(0, 200, 21).tolist()
    runs = [PagedRun(model, block_size=16) for model in (plain, kernels)]
    for step in ({"a": prompt}, {"a": [5], "b": prompt[:9], "c": [8]}):
        wanted, actual = (run.step(step) for run in runs)
        for name in step:
            torch.testing.assert_close(actual[name], wanted[name], atol=2e-5, rtol=2e-5)
