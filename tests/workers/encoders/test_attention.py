"""Attention of encoders by torch, and ranges of rows."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tokenloom.tests.workers.encoders.ranges import by_mask, random_bounds, random_cuts
from tokenloom.workers.encoders.attention import attend, by_heads, parts_of


@pytest.mark.parametrize("seed", range(20))
def test_rows_attend_to_all_rows_between_their_bounds(seed: int) -> None:
    rng = random.Random(seed)
    bounds, num_heads, size = random_bounds(rng), rng.choice((1, 3)), rng.choice((16, 24))
    q, k, v = torch.randn((3, bounds[-1], num_heads, size), generator=torch.Generator().manual_seed(seed))
    cut = rng.randrange(bounds[-1])
    gathered = [by_heads([each[:cut], each[cut:]]) for each in (k, v)]
    start, *_, stop = random_cuts(rng, bounds[-1])
    attended = attend(0.3, q[start:stop], *gathered, bounds, start)
    torch.testing.assert_close(attended.double(), by_mask(0.3, q, k, v, bounds)[start:stop], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_parts_hold_each_row_once_within_its_piece_and_its_bounds(seed: int) -> None:
    rng = random.Random(seed)
    bounds = random_bounds(rng)
    cuts = random_cuts(rng, bounds[-1])[rng.randrange(2) :]
    parts = parts_of(bounds, cuts)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(cuts[0], cuts[-1]))
    for part in parts:
        assert (part.low, part.high) in set(itertools.pairwise(bounds))
        assert part.low <= part.start < part.stop <= part.high
        assert not any(part.start < cut < part.stop for cut in cuts)
