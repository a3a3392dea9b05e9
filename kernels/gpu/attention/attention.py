"""The inner step of decode and prefill attention: a block of queries attends to one tile of keys.

Online softmax in base 2 (Milakov & Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691): `m_i` is the
largest score so far, `l_i` the sum of 2^(score − m_i), `acc` the weighted sum of values; all are float32. The block
table gives the addresses of keys, with 64-bit offsets.

    M  query rows of a program (tokens × query heads of one KV head)    TILE  keys per iteration
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from ...contract import AttentionSpec

LOG2_E = 1.4426950408889634
BASE_2 = tl.constexpr(LOG2_E)
NO_SCORE = tl.constexpr(-1e30)  # initial m_i: below every score, but finite, as −inf − −inf would be NaN


@triton.jit
def key_places(table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return the blocks (int64) of keys start … start + TILE − 1 and the keys' offsets in them [TILE].

    If TILE divides BLOCK_SIZE, `start` must be a multiple of TILE; then one scalar is the block of all these keys, also
    of those ≥ end. Otherwise the blocks are [TILE], and keys ≥ end get block 0."""
    keys = start + tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        blocks = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
    else:  # a single return for both branches, as the compiler requires one type
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
    return blocks, keys % BLOCK_SIZE


@triton.jit
def no_keys(sinks, heads, exists, M: tl.constexpr, DIM_PAD: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Return acc, m_i and l_i before the first key. A sink acts like a key with its score and no value. exists: [M],
    whether a query row has a sink; heads: [M], the query head of each query row."""
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    m_i = tl.full([M], NO_SCORE, tl.float32)
    l_i = tl.zeros([M], tl.float32)
    if HAS_SINKS:
        m_i = tl.maximum(tl.load(sinks + heads, mask=exists, other=NO_SCORE) * BASE_2, NO_SCORE)
        l_i = exists.to(tl.float32)
    return acc, m_i, l_i


@triton.jit
def bias_pointers(bias, heads, positions, NUM_DISTANCES: tl.constexpr):
    """Return pointers [M] to the biases of key 0 for queries of these heads and positions."""
    return bias + heads.to(tl.int64) * NUM_DISTANCES + (NUM_DISTANCES // 2 - positions)


def num_distances(spec: AttentionSpec) -> int:
    """Return the number of biases of a head; 0: there are none."""
    return 0 if spec.bias is None else spec.bias.shape[1]


def score_arguments(spec: AttentionSpec) -> tuple[float, float]:
    """Return the arguments `scale` and `cap` of attend_tile."""
    if not spec.softcap:
        return spec.scale * LOG2_E, 0.0
    return spec.scale * LOG2_E * 2 / spec.softcap, spec.softcap * LOG2_E


@triton.jit
def attend_tile(
    query,  # [M, DIM_PAD]
    positions,  # [M]
    limits,  # [M]: the last key that each query attends to
    bias_rows,  # [M]: with HAS_BIAS, pointers to the biases of each query's key 0
    acc,  # [M, DIM_PAD]
    m_i,  # [M]
    l_i,  # [M]
    keys_base,  # this and the next two: see tile_bases
    values_base,
    scale_bases,
    table,  # block table of the row
    start,  # first key of the tile
    begin,  # with HAS_WINDOW the first key that any of the queries attends to
    end,  # number of keys of the row
    scale,  # factor of scores × log2(e), and × 2 / softcap with HAS_SOFTCAP
    cap,  # the soft cap × log2(e)
    window,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Return acc, m_i and l_i after the tile of TILE keys from `start`. Without IS_MASKED all these keys must exist,
    and every query must attend to all of them.

    Keys before `begin` in other blocks are not read: their block may be the null block, and 0 * NaN is NaN."""
    dims = tl.arange(0, DIM_PAD)
    keys = start + tl.arange(0, TILE)
    blocks, places = key_places(table, start, end, BLOCK_SIZE, TILE)
    offsets = (blocks * block_stride + places * HEAD_DIM)[:, None] + dims[None, :]
    is_read = keys < end
    if IS_MASKED and HAS_WINDOW and BLOCK_SIZE % TILE != 0:
        is_read = is_read & (keys >= begin)
    if IS_MASKED or HEAD_DIM != DIM_PAD:
        exists = is_read[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys_base + offsets, mask=exists, other=0.0)
    else:
        key = tl.load(keys_base + offsets)
    score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
    if LARGEST > 0:
        scale_offsets = blocks * (block_stride // 4) + places
        score = score * tl.load(scale_bases[0] + scale_offsets, mask=is_read, other=0.0)[None, :]
    if HAS_SOFTCAP:  # tanh(z) is 1 − 2 / (1 + e^2z)
        score = cap - 2.0 * cap / (1.0 + tl.exp2(score))
    if HAS_BIAS:
        biases = bias_rows[:, None] + keys[None, :]
        score = score + BASE_2 * tl.load(biases, mask=(keys[None, :] <= limits[:, None]) & is_read[None, :], other=0.0)
    if IS_MASKED:
        is_seen = (keys[None, :] <= limits[:, None]) & (keys[None, :] < end)
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
        score = tl.where(is_seen, score, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(score, axis=1))
    weight = tl.exp2(score - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(weight, axis=1)
    if IS_MASKED or HEAD_DIM != DIM_PAD:
        exists = is_read[:, None] & (dims < HEAD_DIM)[None, :]
        value = tl.load(values_base + offsets, mask=exists, other=0.0)
    else:
        value = tl.load(values_base + offsets)
    if LARGEST > 0:  # weight × scale alone could be a subnormal float16
        value_scale = tl.load(scale_bases[1] + scale_offsets, mask=is_read, other=0.0)
        weight = weight * (value_scale * LARGEST)[None, :]
    weight = weight.to(query.dtype)
    acc = tl.dot(weight, value.to(query.dtype), acc * alpha[:, None], input_precision="ieee")
    return acc, m_new, l_i


@triton.jit
def mean_value(acc, l_i, LARGEST: tl.constexpr):
    """Compute the attention output [M, DIM_PAD]: acc / l_i, without the factor LARGEST that acc has with a cache
    of bytes; 0 for queries without keys."""
    if LARGEST > 0:
        l_i = l_i * LARGEST
    return acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
