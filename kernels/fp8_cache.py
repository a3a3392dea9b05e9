"""The fp8 KV cache: e4m3 numbers, and one float32 scale per vector of head_dim elements.

    a tile, [block_size, D + 4] bytes:   block_size × D numbers │ block_size scales

A vector's scale is its largest magnitude / 448, or 1 for zeros; an element is its number times that scale. With 3 bits
of mantissa and 2^-9 as the least number, the error of an element x of a vector with largest magnitude m is at most
max(|x| / 16, m / 448 · 2^-10). This needs no calibration and never saturates. A cache of dtype uint8 has this format.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4  # per vector
LARGEST = 448.0  # largest e4m3 number
DTYPE = torch.uint8  # dtype of the cache tensor


def is_fp8(kv_cache: Tensor) -> bool:
    """Return whether `kv_cache` has this module's format."""
    return kv_cache.dtype == DTYPE


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize finite x [..., D]; return its numbers [..., D] uint8 and scales [...] float32."""
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    return (wide / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8), scales


def parts(tiles: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """View tiles [..., block_size * (D + 4)] uint8 as numbers [..., block_size, D] and scales [..., block_size]."""
    num_bytes = tiles.shape[-1] - block_size * SCALE_BYTES
    numbers = tiles[..., :num_bytes].view(*tiles.shape[:-1], block_size, num_bytes // block_size)
    return numbers, tiles[..., num_bytes:].view(torch.float32)


def decode(tiles: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Dequantize tiles [..., block_size * (D + 4)] uint8 to [..., block_size, D] of `dtype`."""
    numbers, scales = parts(tiles, block_size)
    return (numbers.view(torch.float8_e4m3fn).float() * scales[..., None]).to(dtype)
