"""Draws are those by all noise and filters that sort, follow the exact filtered distribution, and depend on seed, token
and position alone; greedy is argmax."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.kernels.cpu.sampling import load_cpu_sampling
from tokenloom.tests.support.sampling_reference import Wanted, filtered, scores
from tokenloom.workers.sampling.sampler import Sampler
from tokenloom.workers.sampling.sampling_columns import SamplingColumns

F64 = npt.NDArray[np.float64]
SAMPLER = Sampler()
WITH_KERNELS = Sampler(load_cpu_sampling())  # without, where there are none


# 99.9 % quantiles of chi-square by degrees of freedom (Wilson-Hilferty is within 1 % from 3 on).
def chi_square_limit(degrees: int) -> float:
    return float(degrees * (1 - 2 / (9 * degrees) + 3.09 * np.sqrt(2 / (9 * degrees))) ** 3)


def columns_of(rows: list[RowSampling]) -> SamplingColumns:
    columns = SamplingColumns.greedy(len(rows))
    for row, sampling in enumerate(rows):
        columns.put(row, sampling)
    return columns


def wanted_of(sampling: RowSampling) -> Wanted:
    fields = ("temperature", "top_k", "top_p", "min_p", "seed")
    return Wanted(**{name: getattr(sampling, name) for name in fields})


def filtered_distribution(logits: F64, sampling: RowSampling) -> F64:
    """Return the tokens of one row that pass the filters of the reference."""
    scaled = filtered(logits, wanted_of(sampling))
    probabilities = np.exp(scaled - scaled.max())
    return np.asarray(probabilities / probabilities.sum())


def draw(logits: F64, sampling: RowSampling, num_draws: int) -> npt.NDArray[np.int64]:
    """`num_draws` tokens from one distribution, at as many positions."""
    rows = torch.from_numpy(logits.astype(np.float32)).expand(num_draws, -1)
    columns = columns_of([sampling]).take(np.zeros(num_draws, np.int64))
    return SAMPLER.sample(rows, columns, np.arange(num_draws))


LOGITS = {
    "peaked": np.random.default_rng(1).normal(0, 3, 60),
    "tied": np.round(np.random.default_rng(2).normal(0, 1.5, 40)),  # as logits in bf16: many equal values
}
NUM_DRAWS = 100_000
CASES = [
    RowSampling(),
    RowSampling(temperature=0.6),
    RowSampling(temperature=2.5),
    RowSampling(top_k=1),
    RowSampling(top_k=7),
    RowSampling(top_k=1000),
    RowSampling(top_p=0.05),
    RowSampling(top_p=0.5),
    RowSampling(top_p=0.95),
    RowSampling(top_p=0.999999),
    RowSampling(min_p=0.1),
    RowSampling(min_p=1.0),
    RowSampling(temperature=1.5, top_k=12, top_p=0.8),
    RowSampling(temperature=1.5, top_k=12, min_p=0.2),
    RowSampling(temperature=1.5, top_p=0.9, min_p=0.02),
    RowSampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
]


@pytest.mark.nightly
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("sampling", CASES, ids=repr)
def test_many_samples_follow_the_filtered_distribution(logits: str, sampling: RowSampling) -> None:
    """Chi-square of the draws against the exact distribution."""
    expected = filtered_distribution(LOGITS[logits].astype(np.float32).astype(np.float64), sampling)
    counts = np.bincount(draw(LOGITS[logits], sampling, NUM_DRAWS), minlength=len(expected))
    assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
    is_common = expected * NUM_DRAWS >= 5
    observed = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(expected[is_common], expected[~is_common].sum()) * NUM_DRAWS
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        statistic = ((observed - wanted) ** 2 / wanted).sum()
        assert statistic < chi_square_limit(len(wanted) - 1)


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
