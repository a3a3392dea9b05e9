"""The noise is Philox4x32-10 as published, and exponential after its transform."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tokenloom.kernels.noise import (
    MAX_GUMBEL,
    gumbel,
    philox4x32,
    token_bits,
    vocabulary_bits,
)

# kat_vectors of Random123 1.14, lines "philox4x32 10": counter, key, answer.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(counter: str, key: str, answer: str) -> None:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in words(counter))
    k0, k1 = (np.array([word], np.uint64) for word in words(key))
    assert [int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == words(answer)


def test_a_tokens_bits_are_its_lane_of_its_counter() -> None:
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, 200_000, 64)
    positions = rng.integers(0, 1 << 20, 64)
    seeds = rng.integers(0, 1 << 32, (64, 2), dtype=np.uint32)
    zeros, keys = np.zeros(64, np.uint64), seeds.astype(np.uint64).T
    lanes = philox4x32(
        ((token_ids // 4).astype(np.uint64), positions.astype(np.uint64), zeros, zeros), (keys[0], keys[1])
    )
    assert np.array_equal(token_bits(token_ids, positions, seeds), np.choose(token_ids % 4, lanes))


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 1001, 40_003])
def test_whole_vocabularies_repeat_the_bits_of_single_tokens(vocab_size: int) -> None:
    seeds = np.array([[1, 2], [0xFFFFFFFF, 0x80000000]], np.uint32)
    positions = np.array([7, 123_456])
    for row in range(2):
        ids = np.arange(vocab_size)
        single = token_bits(ids, np.full(vocab_size, positions[row]), np.repeat(seeds[row : row + 1], vocab_size, 0))
        assert np.array_equal(vocabulary_bits(vocab_size, int(positions[row]), seeds[row]), single)


def test_purposes_are_independent_streams() -> None:
    seed = np.array([5, 6], np.uint32)
    assert not np.array_equal(vocabulary_bits(64, 9, seed, purpose=0), vocabulary_bits(64, 9, seed, purpose=1))


def test_noise_is_finite_at_both_ends_and_falls_with_the_bits() -> None:
    ends = gumbel(np.array([0, 1, 1 << 31, 0xFFFFFFFF], np.uint32))
    assert np.isfinite(ends).all()
    assert (np.diff(ends) < 0).all()
    assert ends[0] == MAX_GUMBEL == pytest.approx(33 * math.log(2), abs=1e-9)
    assert ends[3] == pytest.approx(-math.log(33 * math.log(2)), abs=1e-9)


def test_noise_is_gumbel_distributed() -> None:
    sample = np.sort(gumbel(vocabulary_bits(100_000, 3, np.array([11, 12], np.uint32))))
    cdf = np.exp(-np.exp(-sample))
    empirical = (np.arange(len(sample)) + 0.5) / len(sample)
    assert np.abs(cdf - empirical).max() < 1.95 / math.sqrt(len(sample))  # Kolmogorov-Smirnov at 0.1 %
