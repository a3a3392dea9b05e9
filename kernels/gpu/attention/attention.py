"""What decode and prefill attention share: one tile of keys met by a block of queries, in Triton.

Online softmax in base 2 (Milakov & Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691): `m_i` is the
largest score so far, `l_i` the sum of 2^(score − m_i), `acc` the weighted values, all float32. Keys are found
through the block table; offsets are 64 bits wide. Knows no grid.

    M  query rows of a program (tokens × query heads of one KV head)    TILE  keys met at once
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...fp8_cache import is_fp8

LOG2_E = 1.4426950408889634
VALUE_LIFT = tl.constexpr(256.0)  # of a weight times an fp8 cache's scale, at most 146: float16 loses what is small
NO_SCORE = tl.constexpr(-1e30)  # below every score, and finite: a query that has met no key yet makes no NaN


@triton.jit
def key_places(table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Blocks (int64) of keys start … start + TILE − 1 and their places there; those ≥ end: block 0."""
    keys = start + tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        blocks = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
    else:  # one return for both: the compiler goes on past a return, and would see two types
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
    return blocks, keys % BLOCK_SIZE


@triton.jit
def tile_bases(
    kv_cache, scales, layer_offset, kv_head,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Where in block 0 the keys and values of this layer and KV head begin, and their scales in an fp8 cache."""
    NUMBERS: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    if IS_FP8:
        TILE_BYTES: tl.constexpr = NUMBERS + 4 * BLOCK_SIZE
        start = layer_offset + kv_head * TILE_BYTES
        first = scales + (start + NUMBERS) // 4
        keys = kv_cache + start
        return keys, keys + NUM_KV_HEADS * TILE_BYTES, (first, first + NUM_KV_HEADS * (TILE_BYTES // 4))
    keys = kv_cache + layer_offset + kv_head * NUMBERS
    return keys, keys + NUM_KV_HEADS * NUMBERS, (scales, scales)


def kernel_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """The cache as the kernels take it: its numbers, and in an fp8 cache the same memory as float32, for the scales."""
    if not is_fp8(kv_cache):
        return kv_cache, kv_cache
    return kv_cache.view(torch.float8_e4m3fn), kv_cache.view(torch.float32)


@triton.jit
def attend_tile(
    query,  # [M, DIM_PAD]
    positions,  # [M]
    acc,  # [M, DIM_PAD]
    m_i,  # [M]
    l_i,  # [M]
    keys_base,  # of this layer and KV head in block 0
    values_base,
    scale_bases,  # likewise of both, in an fp8 cache
    table,  # of this row
    start,  # first key of the tile
    end,  # keys before this exist
    scale,  # of scores, times log2(e)
    cap,  # soft cap, times log2(e)
    window,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """acc, m_i and l_i after one more tile. Unmasked: every query sees every key of the tile."""
    dims = tl.arange(0, DIM_PAD)
    keys = start + tl.arange(0, TILE)
    blocks, places = key_places(table, start, end, BLOCK_SIZE, TILE)
    offsets = (blocks * block_stride + places * HEAD_DIM)[:, None] + dims[None, :]
    if IS_MASKED or HEAD_DIM != DIM_PAD:
        exists = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys_base + offsets, mask=exists, other=0.0)
    else:
        key = tl.load(keys_base + offsets)
    score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
    if IS_FP8:
        scale_offsets = blocks * (block_stride // 4) + places
        score = score * tl.load(scale_bases[0] + scale_offsets, mask=keys < end, other=0.0)[None, :]
    if HAS_CAP:  # cap · tanh(score / cap), with tanh x = 1 − 2 / (1 + e^2x)
        score = cap * (1.0 - 2.0 / (1.0 + tl.exp2(score * (2.0 * 1.4426950408889634 / cap))))
    if IS_MASKED:
        is_seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] < end)
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
        score = tl.where(is_seen, score, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(score, axis=1))
    weight = tl.exp2(score - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(weight, axis=1)
    if IS_MASKED or HEAD_DIM != DIM_PAD:
        exists = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
        value = tl.load(values_base + offsets, mask=exists, other=0.0)
    else:
        value = tl.load(values_base + offsets)
    if IS_FP8:
        value_scale = tl.load(scale_bases[1] + scale_offsets, mask=keys < end, other=0.0)
        weight = weight * (value_scale * VALUE_LIFT)[None, :]
    weight = weight.to(query.dtype)
    acc = tl.dot(weight, value.to(query.dtype), acc * alpha[:, None], input_precision="ieee")
    return acc, m_new, l_i


@triton.jit
def mean_value(acc, l_i, IS_FP8: tl.constexpr):
    """What the queries have attended to [M, DIM_PAD]; 0 of one that has met no key."""
    if IS_FP8:
        l_i = l_i * VALUE_LIFT
    return acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
