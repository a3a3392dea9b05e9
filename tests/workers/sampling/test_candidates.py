"""A token is ruled out exactly when even the luckiest noise could not lift it to the score that is reached."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tokenloom.kernels.noise import MAX_GUMBEL, gumbel, vocabulary_bits
from tokenloom.workers.sampling.candidates import RowDraw, find_candidates


def draw_of(reached_noise: float, top_p: float = 1.0) -> RowDraw:
    return RowDraw(
        row=0,
        position=17,
        temperature=np.float32(1.0),
        top_k=0,
        top_p=top_p,
        min_p=0.0,
        seed=np.array([1, 2], np.uint32),
        largest=np.float32(0.0),
        reached_noise=reached_noise,
    )


@pytest.mark.parametrize("reached_noise", [-3.1, 0.0, 2.5, 11.0, MAX_GUMBEL])
def test_the_weight_floor_is_the_least_that_the_largest_noise_lifts_to_the_score(reached_noise: float) -> None:
    floor = draw_of(reached_noise).least_winning_weight
    assert math.log(floor) + MAX_GUMBEL < reached_noise, "a token under the floor could have won"
    assert math.log(floor * 1.01) + MAX_GUMBEL > reached_noise, "the floor lets in tokens that cannot win"


@pytest.mark.parametrize("reached_noise", [-3.1, 0.0, 2.5, 11.0])
def test_noise_above_the_scale_never_reaches_the_score(reached_noise: float) -> None:
    weights = np.exp(-np.linspace(0, 20, 50))
    bits = np.floor(weights * draw_of(reached_noise).noise_scale()) + 1
    is_possible = bits < 2**32
    scores = np.log(weights[is_possible]) + gumbel(bits[is_possible].astype(np.uint32))
    assert is_possible.any() and (scores < reached_noise).all()


def test_a_wide_row_is_thinned_by_its_noise() -> None:
    vocab_size, reached = 20_000, 3.0
    logits = torch.zeros(1, vocab_size)
    found = find_candidates(logits, [draw_of(reached)], None)[0].token_ids
    winners = np.flatnonzero(gumbel(vocabulary_bits(vocab_size, 17, np.array([1, 2], np.uint32))) >= reached)
    assert set(winners) <= set(found)
    assert len(found) < 1.2 * len(winners) + 10


@pytest.mark.parametrize("top_p", [0.9, 0.99, 1 - 1e-12])
def test_top_p_cuts_at_the_token_of_exact_sums(top_p: float) -> None:
    draw, rng = draw_of(-30.0, top_p=top_p), np.random.default_rng(2)
    for _ in range(3):
        values = -rng.exponential(3, 152_000).astype(np.float32)
        values -= values.max()
        (found,) = find_candidates(torch.from_numpy(values)[None], [draw], None)
        weights = np.exp(values.astype(np.float64))
        sums = np.sort(weights)[::-1].cumsum() / weights.sum()
        kept = weights[found.filtered(draw).token_ids].sum() / weights.sum()
        assert abs(kept - sums[np.searchsorted(sums, top_p)]) < 1e-6
