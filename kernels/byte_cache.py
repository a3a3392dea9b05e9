"""The KV cache in 8 bits: int8 or e4m3 numbers, and one float32 scale per vector of head_dim elements.

    a tile, [block_size, D + 4] bytes:   block_size × D numbers │ block_size scales

A vector's scale is its largest magnitude m divided by the kind's largest number; an element x is its number times that
scale. This needs no calibration and never saturates. The largest errors:

    int8   m / 254                         numbers −127 … 127
    e4m3   max(|x| / 16, m / 448 · 2^-10)   3 bits of mantissa, 448 as the largest and 2^-9 as the least number

A vector of zeros, or of magnitudes so small that its scale would be subnormal, becomes zeros with the scale 1. The
dtype of the cache tensor tells the kind, see CACHE_DTYPES.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4  # per vector
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}  # dtype of the cache tensor by the value of --kv-cache-dtype
LARGEST = {torch.int8: 127, torch.uint8: 448}  # largest number by dtype of the cache tensor
LEAST_SCALE = 2.0**-126  # the least normal float32


def is_bytes(kv_cache: Tensor) -> bool:
    """Return whether `kv_cache` has this module's format."""
    return kv_cache.dtype in LARGEST


def vector_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the elements of dtype `dtype` that a vector takes in a cache tensor, its scale included."""
    return head_dim + SCALE_BYTES * (dtype in LARGEST)


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize finite x [..., D]; return its numbers [..., D] of the cache's dtype and scales [...] float32."""
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST[dtype]
    scales = torch.where(scales < LEAST_SCALE, 1.0, scales)
    numbers = wide / scales[..., None]
    if dtype == torch.int8:
        return numbers.round().to(torch.int8), scales
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales


def parts(tiles: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """View tiles [..., block_size * (D + 4)] as numbers [..., block_size, D] and scales [..., block_size] float32."""
    num_bytes = tiles.shape[-1] - block_size * SCALE_BYTES
    numbers = tiles[..., :num_bytes].view(*tiles.shape[:-1], block_size, num_bytes // block_size)
    return numbers, tiles[..., num_bytes:].view(torch.float32)


def decode(tiles: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Dequantize tiles [..., block_size * (D + 4)] to [..., block_size, D] of `dtype`."""
    numbers, scales = parts(tiles, block_size)
    if numbers.dtype == torch.uint8:
        numbers = numbers.view(torch.float8_e4m3fn)
    return (numbers.float() * scales[..., None]).to(dtype)
