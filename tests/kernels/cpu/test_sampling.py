"""CpuSampling against numpy and the specification of the noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenloom.kernels import noise
from tokenloom.kernels.cpu.sampling import DRAW, CpuSampling, load_cpu_sampling
from tokenloom.tests.support.today import some

loaded = load_cpu_sampling()
pytestmark = pytest.mark.skipif(loaded is None, reason="the processor has no AVX2, or there is no compiler")


@pytest.fixture
def sampling() -> CpuSampling:
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("vocab_size", [1, 4, 63, 64, 1003, 49_152])
def test_bits_match_the_specification(sampling: CpuSampling, vocab_size: int) -> None:
    logits, draws = torch.zeros(1, vocab_size), np.zeros(40, DRAW)  # each token weighs 1: its bits alone decide
    draws["temperature"] = 1
    draws["noise_scale"] = np.linspace(2.0**32, 2.0**24, len(draws))
    for position, low, high in ((0, 0, 0), (123_456, 0xFFFFFFFF, 0x80000000), (7, 5, 6)):
        draws["position"], draws["seed_low"], draws["seed_high"] = position, low, high
        bits = noise.vocabulary_bits(vocab_size, position, np.array([low, high], np.uint32)).astype(np.float32)
        for draw, listed in zip(draws, sampling.list_candidates(logits, draws), strict=True):
            assert np.array_equal(listed.token_ids, np.flatnonzero(bits <= draw["noise_scale"]))


@pytest.mark.parametrize("seed", some(range(30), 8))
def test_candidates_pass_the_bounds_of_weight_share_and_noise(sampling: CpuSampling, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab_size, num_rows = int(rng.choice([3, 64, 1003, 9001])), 4
    logits = rng.normal(0, rng.choice([0.01, 2, 8]), (num_rows, vocab_size)).astype(np.float32)
    logits[0, 0] = -np.inf
    draws = np.zeros(num_rows, DRAW)
    draws["row"] = rng.permutation(num_rows)
    draws["largest"] = logits[draws["row"]].max(axis=1)
    draws["temperature"] = rng.choice([0.3, 1.0, 4.0], num_rows)
    draws["least_weight"] = rng.choice([0.0, 1e-6, 0.05], num_rows)
    draws["counted_weight"] = rng.choice([0.0, 0.01], num_rows)
    draws["share"] = rng.choice([0.0, 1e-4], num_rows)
    draws["noise_scale"] = rng.choice([0.0, 2.0**31, 2.0**33], num_rows)
    draws["position"], draws["seed_low"], draws["seed_high"] = rng.integers(0, 1 << 32, (3, num_rows))
    for draw, listed in zip(draws, sampling.list_candidates(torch.from_numpy(logits), draws), strict=True):
        weights = np.exp((logits[draw["row"]].astype(np.float64) - draw["largest"]) / draw["temperature"])
        total = weights[weights >= draw["counted_weight"]].sum() if draw["share"] else 0.0
        assert listed.total == pytest.approx(total, rel=1e-4)
        floor = max(draw["least_weight"], draw["share"] * total)
        key = np.array([draw["seed_low"], draw["seed_high"]], np.uint32)
        bits = noise.vocabulary_bits(vocab_size, int(draw["position"]), key)
        reach = weights * draw["noise_scale"] if draw["noise_scale"] else np.inf
        # float32 may decide either way within 1e-4 of a bound
        sure = (weights >= floor * (1 + 1e-4)) & (reach >= bits * (1 + 1e-4))
        possible = (weights >= floor * (1 - 1e-4)) & (reach >= bits * (1 - 1e-4))
        ids = listed.token_ids
        assert (np.diff(ids) > 0).all()
        assert possible[ids].all()
        assert np.isin(np.flatnonzero(sure), ids).all()
