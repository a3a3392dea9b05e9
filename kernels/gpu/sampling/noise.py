"""Philox4x32-10 and Gumbel noise in Triton; the bits equal those of kernels/noise.py."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Compute the four output words of counter (c0, c1, c2, c3) and key (k0, k1); all are uint32, of one shape."""
    multiplier0 = c0 * 0 + tl.full([1], 0xD2511F53, tl.uint32)
    multiplier1 = c0 * 0 + tl.full([1], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(multiplier0, c0), multiplier0 * c0
        high1, low1 = tl.umulhi(multiplier1, c2), multiplier1 * c2
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + tl.full([1], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([1], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def token_bits(token_ids, position, seed_low, seed_high):
    """Compute the bits [n] uint32 of token_ids [n] int32 at one position, for PURPOSE_TOKEN. Scalars are uint32."""
    counter = (token_ids // 4).to(tl.uint32)
    zero = counter * 0
    w0, w1, w2, w3 = philox4x32(counter, zero + position, zero, zero, zero + seed_low, zero + seed_high)
    lane = token_ids % 4
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def run_bits(first_id, position, seed_low, seed_high, LENGTH: tl.constexpr):
    """Compute the bits [LENGTH] uint32 of the tokens from first_id (a multiple of 4) on, each counter once."""
    counter = (first_id // 4 + tl.arange(0, LENGTH // 4)).to(tl.uint32)
    zero = counter * 0
    w0, w1, w2, w3 = philox4x32(counter, zero + position, zero, zero, zero + seed_low, zero + seed_high)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel(bits):
    """Convert noise bits [n] uint32 to Gumbel noise −log E [n] float64, with E = −log(1 − u) and u = (bits + ½) / 2³²,
    as in kernels/noise.py. In double precision 1 − u is exact, so log(1 − u) is as precise as log1p(−u)."""
    uniform = (bits.to(tl.float64) + 0.5) / 4294967296.0
    return -tl.log(-tl.log(1.0 - uniform))
