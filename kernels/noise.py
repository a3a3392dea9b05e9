"""Counter-based noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

The bits of a draw depend only on (seed, token id, position, purpose), so that every process, batch, step and device
draws the same. This is the specification: kernels must make the same bits; their logarithms may round the last places
of a double differently. It computes 32-bit words in numpy's 64-bit integers.

    key      (seed & 0xffffffff, seed >> 32)
    counter  (token_id // 4, position, purpose, 0); the token's bits are word token_id % 4 of the output
    uniform  u = (bits + ½) / 2³²        exponential  E = −log1p(−u)        noise  −log E (Gumbel)
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

PURPOSE_TOKEN = 0  # sampling an output token; another use of the same key needs another number

Words: TypeAlias = npt.NDArray[np.uint64]  # 32-bit words, one in each 64-bit element
Bits: TypeAlias = npt.NDArray[np.uint32]

_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and √3 − 1, added to the key after each round
_MASK = 0xFFFFFFFF
_CHUNK = 8192  # counters per pass: six buffers of 64 KiB fit in the L2 cache


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Compute Philox4x32-10 and return its four output words [n]. Counter words: [n]; key words: [n] or []."""
    c0, c1, c2, c3 = (word.copy() for word in counter)
    k0, k1 = key
    product0, product1 = np.empty_like(c0), np.empty_like(c0)
    mask, half = np.uint64(_MASK), np.uint64(32)
    for _ in range(_NUM_ROUNDS):
        np.multiply(c0, np.uint64(_MULTIPLIERS[0]), out=product0)
        np.multiply(c2, np.uint64(_MULTIPLIERS[1]), out=product1)
        for word, product, other, round_key in ((c0, product1, c1, k0), (c2, product0, c3, k1)):
            np.right_shift(product, half, out=word)  # word = high(product) ^ other ^ key
            np.bitwise_xor(word, other, out=word)
            np.bitwise_xor(word, round_key, out=word)
            np.bitwise_and(word, mask, out=word)  # `other` is the unmasked product of the previous round
        c1, product1 = product1, c1
        c3, product0 = product0, c3
        k0 = (k0 + np.uint64(_WEYL[0])) & mask
        k1 = (k1 + np.uint64(_WEYL[1])) & mask
    return c0, c1 & mask, c2, c3 & mask


def token_bits(
    token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], seeds: Bits, purpose: int = PURPOSE_TOKEN
) -> Bits:
    """Compute bits [n] of (token, position, seed) triples. token_ids, positions: [n]; seeds: [n, 2], low word first."""
    bits = np.empty(len(token_ids), np.uint32)
    for start in range(0, len(token_ids), _CHUNK):
        part = slice(start, start + _CHUNK)
        ids = token_ids[part].astype(np.uint64)
        keys = seeds[part].astype(np.uint64)
        counter = (
            ids >> np.uint64(2),
            positions[part].astype(np.uint64),
            np.full_like(ids, purpose),
            np.zeros_like(ids),
        )
        words = philox4x32(counter, (keys[:, 0], keys[:, 1]))
        bits[part] = np.choose(token_ids[part] & 3, words)
    return bits


def vocabulary_bits(vocab_size: int, position: int, seed: Bits, purpose: int = PURPOSE_TOKEN) -> Bits:
    """Compute the noise bits of every token at one position: [vocab_size]. seed: [2], low word first."""
    num_counters = -(-vocab_size // 4)
    bits = np.empty((num_counters, 4), np.uint32)
    key = (np.asarray(seed[0], np.uint64), np.asarray(seed[1], np.uint64))
    for start in range(0, num_counters, _CHUNK):
        ids = np.arange(start, min(start + _CHUNK, num_counters), dtype=np.uint64)
        counter = (ids, np.full_like(ids, position), np.full_like(ids, purpose), np.zeros_like(ids))
        for lane, words in enumerate(philox4x32(counter, key)):
            bits[start : start + len(ids), lane] = words
    return bits.reshape(-1)[:vocab_size]


def gumbel(bits: Bits) -> npt.NDArray[np.float64]:
    """Turn bits into Gumbel noise −log E in double precision, which samplers add to logit / temperature."""
    uniform = (bits.astype(np.float64) + 0.5) / 2.0**32
    noise: npt.NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    return noise


MAX_GUMBEL = float(gumbel(np.zeros(1, np.uint32))[0])  # 22.87, the largest possible noise
