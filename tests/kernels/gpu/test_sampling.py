"""Sampling in Triton against the definition written out with a sort, and its random bits against noise.py.

A draw may differ from the definition only where a cut or the two best scores lie within rounding of each other: such
cases are found and left out, and there must be few.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.kernels import noise
from tokenloom.kernels.gpu.sampling.noise import gumbel, run_bits, token_bits
from tokenloom.kernels.gpu.sampling.sampling import sample
from tokenloom.tests.support.today import some
from tokenloom.workers.sampling.sampler import Sampler
from tokenloom.workers.sampling.sampling_columns import SamplingColumns

F64 = npt.NDArray[np.float64]


@triton.jit
def _bits_kernel(first_id, position, seed_low, seed_high, tokens, runs, noises, LENGTH: tl.constexpr):
    steps = tl.arange(0, LENGTH)
    low, high = tl.load(seed_low).to(tl.uint32), tl.load(seed_high).to(tl.uint32)
    at = tl.load(position).to(tl.uint32)
    bits = token_bits(first_id + steps, at, low, high)
    tl.store(tokens + steps, bits.to(tl.int64))
    tl.store(runs + steps, run_bits(first_id, at, low, high, LENGTH).to(tl.int64))
    tl.store(noises + steps, gumbel(bits))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # 32-bit words wrap, as they must
@pytest.mark.parametrize("seed", some(range(8), 3))
def test_noise_equals_the_cpus_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    words, position, first_id = [rng.getrandbits(32), rng.getrandbits(32)], rng.getrandbits(31), 4 * rng.randrange(9999)
    length = 64
    tokens, runs = torch.empty(2, length, dtype=torch.int64)
    noises = torch.empty(length, dtype=torch.float64)
    low, high, at = torch.tensor([[words[0]], [words[1]], [position]], dtype=torch.int64)
    _bits_kernel[(1,)](first_id, at, low, high, tokens, runs, noises, LENGTH=length)
    wanted = noise.vocabulary_bits(first_id + length, position, np.array(words, np.uint32))[first_id:]
    assert tokens.tolist() == wanted.tolist()
    assert runs.tolist() == wanted.tolist()
    np.testing.assert_allclose(noises.numpy(), noise.gumbel(wanted), rtol=0, atol=1e-14)


@dataclass(frozen=True)
class Row:
    """The parameters of one row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: tuple[int, int]
    position: int


def draw(logits: npt.NDArray[np.float32], row: Row) -> tuple[int, bool]:
    """The definition: filters on sorted weights, the whole vocabulary's noise. And whether it is a near tie."""
    best = int(np.argmax(logits))
    if row.temperature < 1e-5 or not np.isfinite(logits[best]):
        return best, False
    weights = np.exp((logits.astype(np.float64) - logits[best]) / np.float32(row.temperature))
    kept = weights >= row.min_p
    is_close = bool((np.abs(weights - row.min_p) < 1e-5 * row.min_p).any())
    falling = np.sort(logits[kept])[::-1]
    if 0 < row.top_k < len(falling):
        kept &= logits >= falling[row.top_k - 1]
    if row.top_p < 1:
        values = falling[: int(kept.sum())]
        sums = np.cumsum(np.exp((values.astype(np.float64) - logits[best]) / np.float32(row.temperature)))
        last = min(int(np.searchsorted(sums, row.top_p * sums[-1])), len(values) - 1)
        is_close |= bool(np.abs(sums / sums[-1] - row.top_p).min() < 1e-5)
        kept &= logits >= values[last]
    bits = noise.vocabulary_bits(len(logits), row.position, np.array(row.seed, np.uint32))
    scores = (logits / np.float32(row.temperature)).astype(np.float64) + noise.gumbel(bits)
    scores[~kept] = -np.inf
    first, second = np.sort(scores)[-1:-3:-1]
    return int(np.argmax(scores)), is_close or bool(first - second < 1e-4)


def random_rows(rng: random.Random, num_rows: int) -> list[Row]:
    return [
        Row(
            temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
            top_k=rng.choice([0, 0, -1, 1, 2, 50, 10**6]),
            top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 1e-6]),
            min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
            seed=(rng.getrandbits(32), rng.getrandbits(32)),
            position=rng.randrange(100_000),
        )
        for _ in range(num_rows)
    ]


def sample_rows(logits: torch.Tensor, rows: list[Row], row_ids: list[int] | None = None) -> list[int]:
    def column(values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    seeds = torch.from_numpy(np.array([row.seed for row in rows], np.uint32).view(np.int32))
    tokens = sample(
        logits,
        column(list(range(len(rows))) if row_ids is None else row_ids, torch.int64),
        (
            column([row.temperature for row in rows], torch.float32),
            column([row.top_k for row in rows], torch.int32),
            column([row.top_p for row in rows], torch.float64),
            column([row.min_p for row in rows], torch.float64),
            seeds.to(logits.device),
        ),
        column([row.position for row in rows], torch.int32),
    )
    ids: list[int] = tokens.tolist()
    return ids


def random_logits(rng: random.Random, num_rows: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * rng.choice([0.0, 0.1, 2.0, 6.0])
    if rng.random() < 0.3:
        logits = logits.round()  # ties
    if rng.random() < 0.3:
        logits[:, :: rng.choice([2, 3])] = -torch.inf
    return logits


def check_draws(seed: int) -> int:
    """Rows that were compared."""
    rng = random.Random(seed)
    rows = random_rows(rng, rng.choice([1, 3, 6]))
    logits = random_logits(rng, len(rows), rng.choice([1, 2, 7, 100, 1000, 8192, 8193]))
    tokens = sample_rows(logits, rows)
    num_compared = 0
    for token, row, values in zip(tokens, rows, logits.numpy(), strict=True):
        wanted, is_close = draw(values, row) if len(values) > 1 else (0, False)
        if not is_close:
            assert token == wanted, (seed, row)
            num_compared += 1
    return num_compared


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: words that wrap, logits of −inf
@pytest.mark.parametrize("start", some([0, *range(100, 200, 5)], 1))
def test_draws_match_the_definition(start: int) -> None:
    assert sum(check_draws(seed) for seed in range(start, start + 5)) > 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_device_and_host_samplers_draw_the_same_tokens() -> None:
    rng = random.Random(11)
    rows, logits = random_rows(rng, 8), torch.randn(8, 700, generator=torch.Generator().manual_seed(11)) * 2
    columns, positions = SamplingColumns.greedy(len(rows)), np.array([row.position for row in rows])
    for place, row in enumerate(rows):
        seed = row.seed[0] + (row.seed[1] << 32)
        sampling = RowSampling(
            temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p, seed=seed
        )
        columns.put(place, sampling)
    on_device = Sampler(is_on_device=True).sample(logits, columns, positions)
    assert on_device.tolist() == Sampler().sample(logits, columns, positions).tolist()
    assert len(set(on_device.tolist())) > 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_invalid_rows_get_their_largest_logit_and_padding_gets_zero() -> None:
    row = Row(1.0, 5, 0.9, 0.0, (1, 2), 7)
    logits = torch.randn(4, 50)
    logits[0, 31], logits[0, 40] = torch.nan, torch.inf
    logits[1, 12] = torch.inf
    logits[2] = -torch.inf
    tokens = sample_rows(logits, [row] * 4, row_ids=[0, 1, 2, -1])
    assert tokens == [31, 12, 0, 0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    rng = random.Random(5)
    rows, logits = random_rows(rng, 2), torch.randn(2, 3000, generator=torch.Generator().manual_seed(5))
    together = sample_rows(logits, rows)
    for index in range(2):
        assert sample_rows(logits[index : index + 1], [rows[index]]) == [together[index]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p", "kept", "num_rows"),
    [(0.0, 1, 1.0, 1, 2), (0.0, 0, 0.71, 3, 6), (0.0, 2, 0.6, 2, 4), (0.5, 4, 0.74, 2, 4)],
)
def test_filters_keep_only_the_likeliest(min_p: float, top_k: int, top_p: float, kept: int, num_rows: int) -> None:
    weights = [0.001, 0.35, 0.1, 0.33, 0.219]  # token 1 is the likeliest, then 3 (in the same bin), 4, 2
    rows = [Row(1.0, top_k, top_p, min_p, (seed, 9), seed) for seed in range(num_rows)]
    tokens = sample_rows(torch.tensor(weights).log().repeat(len(rows), 1), rows)
    assert set(tokens) == set([1, 3, 4, 2][:kept])
