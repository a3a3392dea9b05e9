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

from tokenloom.kernels import noise
from tokenloom.kernels.gpu.sampling.sampling import sample
from tokenloom.tests.support.today import some

F64 = npt.NDArray[np.float64]


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
def test_invalid_rows_get_their_largest_logit_and_padding_gets_zero() -> None:
    row = Row(1.0, 5, 0.9, 0.0, (1, 2), 7)
    logits = torch.randn(4, 50)
    logits[0, 31], logits[0, 40] = torch.nan, torch.inf
    logits[1, 12] = torch.inf
    logits[2] = -torch.inf
    tokens = sample_rows(logits, [row] * 4, row_ids=[0, 1, 2, -1])
    assert tokens == [31, 12, 0, 0]


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
