"""Steps without requests reach the limits, pass through a model, and leave the KV cache as it was."""

from __future__ import annotations

import pytest
import torch

from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.tests.workers.history_model import HistoryModel
from tokenloom.workers.sampling.sampler import Sampler
from tokenloom.workers.step.profile import StepLimits, dummy_step, largest_steps, run_dummy
from tokenloom.workers.step.step_inputs import StepInputs

BLOCK_SIZE = 4


def test_the_largest_steps_reach_each_limit() -> None:
    long, wide = largest_steps(StepLimits(max_num_seqs=8, max_num_tokens=100, max_model_len=64), BLOCK_SIZE)
    assert (len(long.token_ids), long.seq_lens.tolist()) == (64, [64])
    assert len(wide.seq_lens) == 8 and len(wide.token_ids) == 96
    chunk, rows = largest_steps(StepLimits(max_num_seqs=8, max_num_tokens=16, max_model_len=64), BLOCK_SIZE)
    assert (len(chunk.token_ids), chunk.positions[0], chunk.seq_lens.tolist()) == (16, 48, [64])
    assert chunk.groups[0].block_tables.shape == (1, 16)
    assert len(rows.token_ids) == 16


@pytest.mark.parametrize(
    "inputs", [dummy_step([1], [1], 4), dummy_step([1, 1], [9, 3], 4), dummy_step([5, 3], [5, 8], 4)]
)
def test_a_dummy_step_runs_and_writes_nothing(inputs: StepInputs) -> None:
    cache = torch.zeros(1, 1, 2, 1, BLOCK_SIZE, 1)
    run_dummy(HistoryModel(), inputs, [cache], sampler=Sampler())
    run_dummy(HistoryModel(), inputs, [cache], sampler=Sampler(), sampling=RowSampling(top_p=0.9), num_logprobs=3)
    assert not cache.any()
