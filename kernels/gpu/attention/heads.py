"""Ops.qk_norm_rope_cache in one launch: normalize and rotate query and key heads, store keys and values.

A program processes some heads of one token, all query, all key or all value heads.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...contract import AttentionMetadata, HeadNorms, Rotary
from ...fp8_cache import LARGEST, is_fp8
from ..launch import next_power_of_2
from .attention import cache_arguments

_HEADS = 4  # per program
_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def finite_or_zero(values):
    return tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0)  # a comparison with NaN is false


@triton.jit
def rotated_halves(
    first, second, weight, cos_sin, position, eps,
    HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Rotate heads, given as two halves [n, D / 2] float32; with HAS_NORM normalize them, over both halves, before."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, HALF_PAD)
    is_dim = dims < HALF
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = 1.0 / tl.sqrt(squares / HEAD_DIM + eps)
        low = tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
        high = tl.load(weight + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)
        first = first * scale[:, None] * low[None, :]
        second = second * scale[:, None] * high[None, :]
    cos = tl.load(cos_sin + position * HEAD_DIM + dims, mask=is_dim, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * HEAD_DIM + HALF + dims, mask=is_dim, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def qk_norm_rope_cache_kernel(
    heads,  # [T, H + 2 * num_kv_heads, D], overwritten
    query_norm,
    key_norm,
    cos_sin,  # [P, D] float32
    kv_cache,
    scales,  # an fp8 cache as float32
    layer_offset,
    block_stride,
    positions,  # [T] int64
    slots,  # [T] int64
    eps,
    token_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = HEAD_DIM + 4 if IS_FP8 else HEAD_DIM
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dims = tl.arange(0, HALF_PAD)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    if part < QUERY_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)
        exists = (head < NUM_HEADS)[:, None] & (dims < HALF)[None, :]
        at = heads + token * token_stride + head[:, None] * HEAD_DIM + dims[None, :]
        first = tl.load(at, mask=exists, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=exists, other=0.0).to(tl.float32)
        first, second = rotated_halves(first, second, query_norm, cos_sin, position, eps, HEAD_DIM, HALF_PAD, HAS_NORM)
        tl.store(at, first.to(heads.dtype.element_ty), mask=exists)
        tl.store(at + HALF, second.to(heads.dtype.element_ty), mask=exists)
    elif slot >= 0:
        is_value = part >= QUERY_PARTS + KV_PARTS
        side = is_value.to(tl.int32)
        head = (part - QUERY_PARTS - side * KV_PARTS) * HEADS + tl.arange(0, HEADS)
        exists = (head < NUM_KV_HEADS)[:, None] & (dims < HALF)[None, :]
        source = head + NUM_HEADS + side * NUM_KV_HEADS
        at = heads + token * token_stride + source[:, None] * HEAD_DIM + dims[None, :]
        first = tl.load(at, mask=exists, other=0.0)
        second = tl.load(at + HALF, mask=exists, other=0.0)
        if not is_value:
            rotated_first, rotated_second = rotated_halves(
                first.to(tl.float32), second.to(tl.float32), key_norm, cos_sin, position, eps,
                HEAD_DIM, HALF_PAD, HAS_NORM,
            )  # fmt: skip
            first = rotated_first.to(heads.dtype.element_ty)
            second = rotated_second.to(heads.dtype.element_ty)
        first, second = finite_or_zero(first), finite_or_zero(second)
        tile = (side * NUM_KV_HEADS + head) * (BLOCK_SIZE * WIDTH)
        place = slot % BLOCK_SIZE
        start = layer_offset + slot // BLOCK_SIZE * block_stride
        if IS_FP8:
            first, second = first.to(tl.float32), second.to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1)) / _LARGEST
            scale = tl.where(scale == 0.0, 1.0, scale)
            scale_at = scales + (start + tile + BLOCK_SIZE * HEAD_DIM) // 4 + place
            tl.store(scale_at, scale, mask=head < NUM_KV_HEADS)
            first, second = first / scale[:, None], second / scale[:, None]
        target = kv_cache + start + place * HEAD_DIM + tile[:, None] + dims[None, :]
        tl.store(target, first.to(kv_cache.dtype.element_ty), mask=exists)
        tl.store(target + HALF, second.to(kv_cache.dtype.element_ty), mask=exists)


def can_fuse_heads(norms: HeadNorms | None, rotary: Rotary, head_dim: int) -> bool:
    """Whether the kernel computes these norms and this rotation: RMS norms of each head before a full rotation."""
    is_plain = rotary.query_scale is None and rotary.cos_sin is not None and rotary.cos_sin.shape[1] == head_dim
    if norms is None or not is_plain:
        return is_plain
    is_rms = all(norm.kind == "rms" and norm.weight is not None for norm in (norms.query, norms.key))
    is_shared = is_rms and norms.query.weight is not None and norms.query.weight.dim() == 1
    return is_shared and not norms.is_after_rope and norms.query.eps == norms.key.eps


def qk_norm_rope_cache(
    heads: Tensor,
    norms: HeadNorms | None,
    cos_sin: Tensor,
    kv_cache: Tensor,
    layer: int,
    metadata: AttentionMetadata,
) -> Tensor:
    """Compute Ops.qk_norm_rope_cache; the result is a view of the query part of `heads`."""
    num_tokens, num_all_heads, head_dim = heads.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    num_heads = num_all_heads - 2 * num_kv_heads
    query_norm, key_norm, eps = cos_sin, cos_sin, 0.0
    if norms is not None:
        assert norms.query.weight is not None and norms.key.weight is not None
        query_norm, key_norm, eps = norms.query.weight, norms.key.weight, norms.query.eps
    if num_tokens:
        grid = (num_tokens, -(-num_heads // _HEADS) + 2 * -(-num_kv_heads // _HEADS))
        qk_norm_rope_cache_kernel[grid](
            heads,
            query_norm,
            key_norm,
            cos_sin,
            *cache_arguments(kv_cache, layer),
            metadata.positions,
            metadata.slots,
            eps,
            heads.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF_PAD=next_power_of_2(head_dim // 2),
            BLOCK_SIZE=block_size,
            HEADS=_HEADS,
            HAS_NORM=norms is not None,
            IS_FP8=is_fp8(kv_cache),
            num_warps=2,
        )
    return heads[:, :num_heads]
