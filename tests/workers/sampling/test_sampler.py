"""Draws are those by all noise and filters that sort, depend on seed, token and position alone; greedy is argmax."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.kernels.cpu.sampling import load_cpu_sampling
from tokenloom.tests.support.sampling_reference import Wanted, scores
from tokenloom.workers.sampling.sampler import Sampler
from tokenloom.workers.sampling.sampling_columns import SamplingColumns

F64 = npt.NDArray[np.float64]
SAMPLER = Sampler()
WITH_KERNELS = Sampler(load_cpu_sampling())  # without, where there are none


def columns_of(rows: list[RowSampling]) -> SamplingColumns:
    columns = SamplingColumns.greedy(len(rows))
    for row, sampling in enumerate(rows):
        columns.put(row, sampling)
    return columns


def wanted_of(sampling: RowSampling) -> Wanted:
    fields = ("temperature", "top_k", "top_p", "min_p", "seed")
    return Wanted(**{name: getattr(sampling, name) for name in fields})


def random_sampling(rng: np.random.Generator) -> RowSampling:
    return RowSampling(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 4.0])),
        top_k=int(rng.choice([0, -1, 1, 5, 300, 5000])),
        top_p=float(rng.choice([1.0, 0.9, 0.3])),
        min_p=float(rng.choice([0.0, 0.05])),
        seed=int(rng.integers(-(2**63), 2**63)),
    )


def brute_force(logits: F64, sampling: RowSampling, position: int) -> int:
    """Noise for every token, filters by sorting, one argmax."""
    return int(scores(logits, [0] * position, (), wanted_of(sampling)).argmax())


@pytest.mark.parametrize("sampler", [SAMPLER, WITH_KERNELS], ids=["numpy", "kernels"])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("vocab_size", [5, 1003, 9001])
def test_pruning_never_changes_the_sampled_token(vocab_size: int, spread: float, sampler: Sampler) -> None:
    rng = np.random.default_rng(vocab_size)
    num_rows = 60
    logits = rng.normal(0, spread, (num_rows, vocab_size)).astype(np.float32)
    rows = [random_sampling(rng) for _ in range(num_rows)]
    positions = rng.integers(1, 100_000, num_rows)
    answer = sampler.sample(torch.from_numpy(logits), columns_of(rows), positions)
    expected = [brute_force(logits[i].astype(np.float64), rows[i], int(positions[i])) for i in range(num_rows)]
    assert answer.tolist() == expected


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert SAMPLER.sample(logits, SamplingColumns.greedy(2), np.zeros(2, np.int64)).tolist() == [1, 0]


def test_a_tiny_temperature_is_greedy() -> None:
    columns = columns_of([RowSampling(temperature=1e-6)])
    assert SAMPLER.sample(torch.tensor([[1.0, 1.01, 1.0]]), columns, np.zeros(1, np.int64)).tolist() == [1]


def test_logits_stay_unchanged_and_minus_infinity_is_never_sampled() -> None:
    logits = torch.full((300, 9), -torch.inf)
    logits[:, 4:6] = 1.0
    before = logits.clone()
    columns = columns_of([RowSampling(temperature=9.0, top_k=8, top_p=0.999)]).take(np.zeros(300, np.int64))
    assert set(SAMPLER.sample(logits, columns, np.arange(300)).tolist()) == {4, 5}
    assert torch.equal(logits, before)


def test_a_row_of_nan_does_not_change_other_rows() -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(0, 2, (3, 500)).astype(np.float32))
    columns = columns_of([RowSampling(seed=row, top_p=0.9) for row in range(3)])
    calm = SAMPLER.sample(logits, columns, np.arange(3)).tolist()
    logits[1, 10] = torch.nan
    answer = SAMPLER.sample(logits, columns, np.arange(3)).tolist()
    assert (answer[0], answer[2]) == (calm[0], calm[2])
    assert 0 <= answer[1] < 500


@pytest.mark.parametrize("sampler", [SAMPLER, WITH_KERNELS], ids=["numpy", "kernels"])
def test_logits_at_the_ends_of_float32_are_sampled(sampler: Sampler) -> None:
    logits = torch.full((4, 300), torch.finfo(torch.float32).min)
    logits[:, 33] = 1.0
    logits[2:, 44] = 3e38
    columns = columns_of([RowSampling(temperature=0.01, top_p=row % 2 * 0.5 + 0.5) for row in range(4)])
    assert sampler.sample(logits, columns, np.arange(4)).tolist() == [33, 33, 44, 44]
