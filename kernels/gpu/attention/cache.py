"""The KV cache as an argument of kernels: its numbers, and with 8 bits (byte_cache.py) their scales.

LARGEST  the largest number of a cache of bytes, 127 (int8) or 448 (e4m3); 0 for one of elements
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...byte_cache import LARGEST as LARGEST_BY_DTYPE
from ...byte_cache import LEAST_SCALE, is_bytes

_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_INT8_LARGEST = tl.constexpr(LARGEST_BY_DTYPE[torch.int8])
_WHOLE = tl.constexpr(1.5 * 2**23)  # the unit in its last place is 1


def largest_number(kv_cache: Tensor) -> int:
    """Return the kernels' LARGEST."""
    return LARGEST_BY_DTYPE.get(kv_cache.dtype, 0)


def cache_arguments(kv_cache: Tensor, layer: int) -> tuple[Tensor, Tensor, int, int]:
    """Return the kernel arguments for one layer of the cache: kv_cache, scales, layer_offset, block_stride.

    `scales` is a cache of bytes viewed as float32. The offset and the stride count elements of the cache.
    """
    numbers = kv_cache.view(torch.float8_e4m3fn) if kv_cache.dtype == torch.uint8 else kv_cache
    scales = kv_cache.view(torch.float32) if is_bytes(kv_cache) else kv_cache
    return numbers, scales, layer * kv_cache.stride(1), kv_cache.stride(0)


@triton.jit
def tile_bases(
    kv_cache, scales, layer_offset, kv_head,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Return pointers to the keys, the values and their scales of one layer and KV head in block 0."""
    NUMBERS: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    if LARGEST > 0:
        TILE_BYTES: tl.constexpr = NUMBERS + 4 * BLOCK_SIZE
        start = layer_offset + kv_head * TILE_BYTES
        first = scales + (start + NUMBERS) // 4
        keys = kv_cache + start
        return keys, keys + NUM_KV_HEADS * TILE_BYTES, (first, first + NUM_KV_HEADS * (TILE_BYTES // 4))
    keys = kv_cache + layer_offset + kv_head * NUMBERS
    return keys, keys + NUM_KV_HEADS * NUMBERS, (scales, scales)


@triton.jit
def vector_scales(first, second, rest, LARGEST: tl.constexpr, REST_PAD: tl.constexpr):
    """Return the scales [n] of n heads, given as three float32 parts [n, …]. REST_PAD 0: there is no third part."""
    largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    if REST_PAD > 0:
        largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
    scale = largest / LARGEST
    return tl.where(scale < _LEAST_SCALE, 1.0, scale)


@triton.jit
def to_numbers(values, scale, LARGEST: tl.constexpr):
    """Divide float32 values [n, m] by scale [n]; round to whole numbers for int8, halves to even."""
    values = values / scale[:, None]
    if LARGEST == _INT8_LARGEST:
        values = (values + _WHOLE) - _WHOLE
    return values
