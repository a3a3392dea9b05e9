"""Attention of encoders by our kernels is that of a dense mask, with the same bits in any company."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.cpu.cpu_ops import make_cpu_ops
from tokenloom.tests.kernels.cpu.levels import LEVELS, kinds
from tokenloom.workers.encoders.attention import Attention, KernelAttention, TorchAttention

KINDS = [(dtype, level) for dtype, level in kinds() if level in LEVELS]


def random_bounds(rng: random.Random) -> list[int]:
    """Equal ranges, as of tiles, or unequal ones of squares of 4 patches, as of windows."""
    if rng.random() < 0.4:
        length = rng.choice((1, 5, 33, 577))
        return [length * tile for tile in range(rng.randrange(1, 4) + 1)]
    lengths = [4 * rng.choice((1, 2, 9, 16)) for _ in range(rng.randrange(1, 12))]
    return list(itertools.accumulate(lengths, initial=0))


def random_cuts(rng: random.Random, num_rows: int) -> list[int]:
    return sorted({0, num_rows, *(rng.randrange(num_rows) for _ in range(rng.randrange(6)))})


def by_mask(scale: float, q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> Tensor:
    """The oracle, in float64 and with a mask for all rows: [n, heads, size] each → [n, heads × size]."""
    part = torch.bucketize(torch.arange(len(q)), torch.tensor(bounds), right=True)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    scores[:, part[:, None] != part[None]] = float("-inf")
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double()).flatten(1)


def attend(attention: Attention, scale: float, heads: Tensor, bounds: list[int], cuts: list[int]) -> Tensor:
    """Attend from the rows from cuts[0] to cuts[-1] to all. heads: q, k, v."""
    q, k, v = heads
    gathered = attention.gather([k], [v], bounds)
    return attention.attend(scale, q[cuts[0] : cuts[-1]], gathered, bounds, cuts)


@pytest.mark.parametrize(("dtype", "level"), [(torch.float32, "torch"), (torch.bfloat16, "torch"), *KINDS])
def test_rows_attend_to_all_rows_between_their_bounds(dtype: torch.dtype, level: str) -> None:
    attention = TorchAttention() if level == "torch" else KernelAttention(make_cpu_ops(dtype, level))
    for seed in range(20):
        rng = random.Random(seed)
        bounds, num_heads, size = random_bounds(rng), rng.choice((1, 3)), rng.choice((16, 24, 64, 72, 80))
        cuts, scale = random_cuts(rng, bounds[-1]), rng.choice((size**-0.5, 0.3))
        heads = torch.randn((3, bounds[-1], num_heads, size), generator=torch.Generator().manual_seed(seed)).to(dtype)
        expected = by_mask(scale, *heads, bounds)
        error = (attend(attention, scale, heads, bounds, cuts) - expected).abs().max()
        assert error < (2e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize(("dtype", "level"), KINDS)
def test_pieces_have_the_same_bits_alone_and_together(dtype: torch.dtype, level: str) -> None:
    attention = KernelAttention(make_cpu_ops(dtype, level))
    for seed in range(20):
        rng = random.Random(seed)
        bounds = random_bounds(rng)
        cuts = random_cuts(rng, bounds[-1])
        heads = torch.randn((3, bounds[-1], 2, 72), generator=torch.Generator().manual_seed(seed)).to(dtype)
        together = attend(attention, 0.2, heads, bounds, cuts)
        alone = [attend(attention, 0.2, heads, bounds, [start, stop]) for start, stop in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(alone), together)


def test_keys_and_values_may_come_in_pieces() -> None:
    q, k, v = torch.randn((3, 24, 2, 24))
    bounds = [0, 12, 24]
    for attention in (TorchAttention(), KernelAttention(make_cpu_ops(torch.float32, LEVELS[-1]))):
        whole = attention.attend(0.2, q, attention.gather([k], [v], bounds), bounds, [0, 24])
        pieces = attention.gather([k[:5], k[5:6], k[6:]], [v[:5], v[5:6], v[6:]], bounds)
        torch.testing.assert_close(attention.attend(0.2, q, pieces, bounds, [0, 24]), whole)
