"""Ops.qk_norm_rope_cache in one launch: normalize and rotate query and key heads, store keys and values.

A program processes some heads of one token: either query heads, key heads or value heads. A head is in three parts: two
halves of PAIRS elements, which are rotated against each other, and the rest.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...contract import AttentionMetadata, HeadNorms, Rotary
from ..launch import next_power_of_2
from ..norm import MAX_WIDTH
from .cache import cache_arguments, largest_number, to_numbers, vector_scales

_HEADS = 4  # per program


@triton.jit
def finite_or_zero(values):
    return tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0)  # a comparison with NaN is false


@triton.jit
def head_sums(first, second, rest, REST_PAD: tl.constexpr, SPANS_HEADS: tl.constexpr):
    """Return the sum of each of n heads, given as three parts [n, …]: [n]. With SPANS_HEADS each value is the sum over
    all n heads. REST_PAD 0: there is no third part."""
    total = tl.sum(first, axis=1) + tl.sum(second, axis=1)
    if REST_PAD > 0:
        total += tl.sum(rest, axis=1)
    if SPANS_HEADS:
        total = tl.zeros_like(total) + tl.sum(total, axis=0)
    return total


@triton.jit
def centered_part(
    values, mean, head, NUM_HEADS: tl.constexpr, LENGTH: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """Subtract the mean [n] from a part of n heads; padding becomes 0."""
    exists = (head < NUM_HEADS)[:, None] & (tl.arange(0, PAD) < LENGTH)[None, :]
    return tl.where(exists, values - mean[:, None], 0.0)


@triton.jit
def scaled_part(
    values, scale, weight, bias, head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr, LENGTH: tl.constexpr, PAD: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Multiply a part of n heads, their elements from START on, by scale [n] and the weight, and add the bias."""
    dims = tl.arange(0, PAD)
    values = values * scale[:, None]
    if IS_PER_HEAD:
        at = START + dims[None, :] + head[:, None] * HEAD_DIM
        exists = (dims < LENGTH)[None, :] & (head < NUM_HEADS)[:, None]
        if HAS_WEIGHT:
            values *= tl.load(weight + at, mask=exists, other=0.0).to(tl.float32)
        if HAS_BIAS:
            values += tl.load(bias + at, mask=exists, other=0.0).to(tl.float32)
    else:
        if HAS_WEIGHT:
            values *= tl.load(weight + START + dims, mask=dims < LENGTH, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            values += tl.load(bias + START + dims, mask=dims < LENGTH, other=0.0).to(tl.float32)[None, :]
    return values


@triton.jit
def normalized_heads(
    first, second, rest, weight, bias, head, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_PER_HEAD: tl.constexpr, SPANS_HEADS: tl.constexpr,
):  # fmt: skip
    """Normalize heads, given as three float32 parts whose padding is 0."""
    COUNT: tl.constexpr = NUM_HEADS * HEAD_DIM if SPANS_HEADS else HEAD_DIM
    REST: tl.constexpr = HEAD_DIM - 2 * PAIRS
    if NORM == "layer":
        mean = head_sums(first, second, rest, REST_PAD, SPANS_HEADS) / COUNT
        first = centered_part(first, mean, head, NUM_HEADS, PAIRS, HALF_PAD)
        second = centered_part(second, mean, head, NUM_HEADS, PAIRS, HALF_PAD)
        if REST_PAD > 0:
            rest = centered_part(rest, mean, head, NUM_HEADS, REST, REST_PAD)
    squares = head_sums(first * first, second * second, rest * rest, REST_PAD, SPANS_HEADS)
    scale = 1.0 / tl.sqrt(squares / COUNT + eps)
    first = scaled_part(
        first, scale, weight, bias, head, NUM_HEADS, HEAD_DIM, 0, PAIRS, HALF_PAD, HAS_WEIGHT, HAS_BIAS, IS_PER_HEAD
    )
    second = scaled_part(
        second, scale, weight, bias, head, NUM_HEADS, HEAD_DIM, PAIRS, PAIRS, HALF_PAD,
        HAS_WEIGHT, HAS_BIAS, IS_PER_HEAD,
    )  # fmt: skip
    if REST_PAD > 0:
        rest = scaled_part(
            rest, scale, weight, bias, head, NUM_HEADS, HEAD_DIM, 2 * PAIRS, REST, REST_PAD,
            HAS_WEIGHT, HAS_BIAS, IS_PER_HEAD,
        )  # fmt: skip
    return first, second, rest


@triton.jit
def rotated_heads(first, second, cos_sin, position, PAIRS: tl.constexpr, HALF_PAD: tl.constexpr):
    """Rotate the first halves of heads against the second halves."""
    dims = tl.arange(0, HALF_PAD)
    at, is_dim = cos_sin + position * (2 * PAIRS) + dims, dims < PAIRS
    cos = tl.load(at, mask=is_dim, other=0.0)[None, :]
    sin = tl.load(at + PAIRS, mask=is_dim, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def finished_heads(
    first, second, rest, weight, bias, cos_sin, position, head, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_PER_HEAD: tl.constexpr, SPANS_HEADS: tl.constexpr, IS_AFTER_ROPE: tl.constexpr, IS_ROTATED: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate heads, with IS_AFTER_ROPE in the opposite order; return the three parts as float32."""
    first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
    if NORM != "none" and not IS_AFTER_ROPE:
        first, second, rest = normalized_heads(
            first, second, rest, weight, bias, head, eps, NUM_HEADS, HEAD_DIM, PAIRS, HALF_PAD, REST_PAD,
            NORM, HAS_WEIGHT, HAS_BIAS, IS_PER_HEAD, SPANS_HEADS,
        )  # fmt: skip
    if IS_ROTATED:
        first, second = rotated_heads(first, second, cos_sin, position, PAIRS, HALF_PAD)
    if NORM != "none" and IS_AFTER_ROPE:
        first, second, rest = normalized_heads(
            first, second, rest, weight, bias, head, eps, NUM_HEADS, HEAD_DIM, PAIRS, HALF_PAD, REST_PAD,
            NORM, HAS_WEIGHT, HAS_BIAS, IS_PER_HEAD, SPANS_HEADS,
        )  # fmt: skip
    return first, second, rest


@triton.jit
def qk_norm_rope_cache_kernel(
    heads,  # [T, H + 2 * num_kv_heads, D], overwritten
    query_weight,  # this and the next three: parameters of the norms, [D] or [heads, D]
    query_bias,
    key_weight,
    key_bias,
    cos_sin,  # [P, 2 * PAIRS] float32
    query_scale,  # [P] float32
    kv_cache,
    scales,  # a cache of bytes as float32
    layer_offset,
    block_stride,
    positions,  # [T] int64
    slots,  # [T] int64
    eps,
    token_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PER_HEAD: tl.constexpr,
    SPANS_HEADS: tl.constexpr,
    IS_AFTER_ROPE: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    HAS_QUERY_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    WIDTH: tl.constexpr = HEAD_DIM + 4 if LARGEST > 0 else HEAD_DIM
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dims = tl.arange(0, HALF_PAD)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    if part < QUERY_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)
        exists = (head < NUM_HEADS)[:, None] & (dims < PAIRS)[None, :]
        row = heads + token * token_stride + head[:, None] * HEAD_DIM
        at = row + dims[None, :]
        first = tl.load(at, mask=exists, other=0.0)
        second = tl.load(at + PAIRS, mask=exists, other=0.0)
        rest = first
        if REST_PAD > 0:
            rest_dims = 2 * PAIRS + tl.arange(0, REST_PAD)
            rest_exists = (head < NUM_HEADS)[:, None] & (rest_dims < HEAD_DIM)[None, :]
            rest = tl.load(row + rest_dims[None, :], mask=rest_exists, other=0.0)
        first, second, rest = finished_heads(
            first, second, rest, query_weight, query_bias, cos_sin, position, head, eps, NUM_HEADS, HEAD_DIM,
            PAIRS, HALF_PAD, REST_PAD, NORM, HAS_WEIGHT, HAS_BIAS, IS_PER_HEAD, SPANS_HEADS, IS_AFTER_ROPE, IS_ROTATED,
        )  # fmt: skip
        if HAS_QUERY_SCALE:
            scale = tl.load(query_scale + position)
            first, second, rest = first * scale, second * scale, rest * scale
        tl.store(at, first.to(heads.dtype.element_ty), mask=exists)
        tl.store(at + PAIRS, second.to(heads.dtype.element_ty), mask=exists)
        if REST_PAD > 0:
            tl.store(row + rest_dims[None, :], rest.to(heads.dtype.element_ty), mask=rest_exists)
    elif slot >= 0:
        is_value = part >= QUERY_PARTS + KV_PARTS
        side = is_value.to(tl.int32)
        head = (part - QUERY_PARTS - side * KV_PARTS) * HEADS + tl.arange(0, HEADS)
        exists = (head < NUM_KV_HEADS)[:, None] & (dims < PAIRS)[None, :]
        source = head + NUM_HEADS + side * NUM_KV_HEADS
        row = heads + token * token_stride + source[:, None] * HEAD_DIM
        at = row + dims[None, :]
        first = tl.load(at, mask=exists, other=0.0)
        second = tl.load(at + PAIRS, mask=exists, other=0.0)
        rest = first
        if REST_PAD > 0:
            rest_dims = 2 * PAIRS + tl.arange(0, REST_PAD)
            rest_exists = (head < NUM_KV_HEADS)[:, None] & (rest_dims < HEAD_DIM)[None, :]
            rest = tl.load(row + rest_dims[None, :], mask=rest_exists, other=0.0)
        if not is_value:
            new_first, new_second, new_rest = finished_heads(
                first, second, rest, key_weight, key_bias, cos_sin, position, head, eps, NUM_KV_HEADS, HEAD_DIM,
                PAIRS, HALF_PAD, REST_PAD, NORM, HAS_WEIGHT, HAS_BIAS, IS_PER_HEAD, SPANS_HEADS, IS_AFTER_ROPE,
                IS_ROTATED,
            )  # fmt: skip
            first = new_first.to(heads.dtype.element_ty)
            second = new_second.to(heads.dtype.element_ty)
            rest = new_rest.to(heads.dtype.element_ty)
        first, second, rest = finite_or_zero(first), finite_or_zero(second), finite_or_zero(rest)
        tile = (side * NUM_KV_HEADS + head) * (BLOCK_SIZE * WIDTH)
        place = slot % BLOCK_SIZE
        start = layer_offset + slot // BLOCK_SIZE * block_stride
        if LARGEST > 0:
            first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
            scale = vector_scales(first, second, rest, LARGEST, REST_PAD)
            scale_at = scales + (start + tile + BLOCK_SIZE * HEAD_DIM) // 4 + place
            tl.store(scale_at, scale, mask=head < NUM_KV_HEADS)
            first, second = to_numbers(first, scale, LARGEST), to_numbers(second, scale, LARGEST)
            rest = to_numbers(rest, scale, LARGEST)
        row = kv_cache + start + place * HEAD_DIM + tile[:, None]
        tl.store(row + dims[None, :], first.to(kv_cache.dtype.element_ty), mask=exists)
        tl.store(row + PAIRS + dims[None, :], second.to(kv_cache.dtype.element_ty), mask=exists)
        if REST_PAD > 0:
            tl.store(row + rest_dims[None, :], rest.to(kv_cache.dtype.element_ty), mask=rest_exists)


def can_fuse_heads(norms: HeadNorms | None, num_heads: int, head_dim: int) -> bool:
    """Return whether the kernel supports these norms: both must have the same kind, eps and numbers of axes, and norms
    over all heads of a token must fit into registers."""
    if norms is None:
        return True
    forms = [
        (norm.kind, norm.eps, *(None if each is None else each.dim() for each in (norm.weight, norm.bias)))
        for norm in (norms.query, norms.key)
    ]
    return forms[0] == forms[1] and not (norms.spans_heads and num_heads * head_dim > MAX_WIDTH)


def qk_norm_rope_cache(
    heads: Tensor,
    norms: HeadNorms | None,
    rotary: Rotary,
    kv_cache: Tensor,
    layer: int,
    metadata: AttentionMetadata,
) -> Tensor:
    """Compute Ops.qk_norm_rope_cache; the result is a view of the query part of `heads`."""
    num_tokens, num_all_heads, head_dim = heads.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    num_heads = num_all_heads - 2 * num_kv_heads
    pairs = (head_dim if rotary.cos_sin is None else rotary.cos_sin.shape[1]) // 2
    rest = head_dim - 2 * pairs
    norm = None if norms is None else norms.query
    vectors: list[Tensor | None] = [None] * 4
    if norms is not None:
        vectors = [norms.query.weight, norms.query.bias, norms.key.weight, norms.key.bias]
    spans_heads = norms is not None and norms.spans_heads
    num_together = next_power_of_2(max(num_heads, num_kv_heads)) if spans_heads else _HEADS
    if num_tokens:
        grid = (num_tokens, -(-num_heads // num_together) + 2 * -(-num_kv_heads // num_together))
        qk_norm_rope_cache_kernel[grid](
            heads,
            *(heads if each is None else each for each in (*vectors, rotary.cos_sin, rotary.query_scale)),
            *cache_arguments(kv_cache, layer),
            metadata.positions,
            metadata.slots,
            0.0 if norm is None else norm.eps,
            heads.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PAIRS=pairs,
            HALF_PAD=next_power_of_2(pairs),
            REST_PAD=next_power_of_2(rest) if rest else 0,
            BLOCK_SIZE=block_size,
            HEADS=num_together,
            NORM="none" if norm is None else norm.kind,
            HAS_WEIGHT=norm is not None and norm.weight is not None,
            HAS_BIAS=norm is not None and norm.bias is not None,
            IS_PER_HEAD=norm is not None and norm.weight is not None and norm.weight.dim() > 1,
            SPANS_HEADS=spans_heads,
            IS_AFTER_ROPE=norms is not None and norms.is_after_rope,
            IS_ROTATED=rotary.cos_sin is not None,
            HAS_QUERY_SCALE=rotary.query_scale is not None,
            LARGEST=largest_number(kv_cache),
            num_warps=8 if spans_heads else 2,
        )
    return heads[:, :num_heads]
