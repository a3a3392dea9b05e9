"""Random ranges of rows that attend to each other, and the attention within them by a dense mask."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor


def random_bounds(rng: random.Random) -> list[int]:
    """Equal ranges, as of tiles, with a shorter last one, as of audio, or unequal ones of squares of 4 patches, as of
    windows."""
    if rng.random() < 0.4:
        length = rng.choice((1, 5, 33, 577))
        whole = [length * tile for tile in range(rng.randrange(1, 4) + 1)]
        return whole if length == 1 or rng.random() < 0.5 else [*whole, whole[-1] + rng.randrange(1, length)]
    lengths = [4 * rng.choice((1, 2, 9, 16)) for _ in range(rng.randrange(1, 12))]
    return list(itertools.accumulate(lengths, initial=0))


def random_cuts(rng: random.Random, num_rows: int) -> list[int]:
    """The first rows of pieces, the first of which begins at 0, and the row behind the last."""
    return sorted({0, num_rows, *(rng.randrange(num_rows) for _ in range(rng.randrange(6)))})


def by_mask(scale: float, q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> Tensor:
    """Attention in float64 with a mask for all rows: [n, heads, size] each → [n, heads × size]."""
    part = torch.bucketize(torch.arange(len(q)), torch.tensor(bounds), right=True)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    scores[:, part[:, None] != part[None]] = float("-inf")
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double()).flatten(1)
