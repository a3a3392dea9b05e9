"""Keys and values in 8 bits: e4m3 numbers, and one float32 scale for each vector of head_dim.

    a tile, [block_size, D + 4] bytes:   block_size × D numbers │ block_size scales

A number stands for itself times its vector's scale, which is the vector's largest magnitude / 448. With 3 bits of
mantissa and 2^-9 as the least number, an element x of a vector with largest magnitude m is stored within
max(|x| / 16, m / 448 · 2^-10). No calibration, nothing saturates. A cache of uint8 is such a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4  # of each vector
LARGEST = 448.0  # of e4m3
DTYPE = torch.uint8  # of the cache


def is_fp8(kv_cache: Tensor) -> bool:
    return kv_cache.dtype == DTYPE


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D], finite → its numbers [..., D] uint8, its scales [...] float32."""
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    return (wide / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8), scales


def parts(tiles: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Views of tiles [..., block_size * (D + 4)] uint8: numbers [..., block_size, D], scales [..., block_size]."""
    num_bytes = tiles.shape[-1] - block_size * SCALE_BYTES
    numbers = tiles[..., :num_bytes].view(*tiles.shape[:-1], block_size, num_bytes // block_size)
    return numbers, tiles[..., num_bytes:].view(torch.float32)


def decode(tiles: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Tiles [..., block_size * (D + 4)] uint8 → [..., block_size, D]."""
    numbers, scales = parts(tiles, block_size)
    return (numbers.view(torch.float8_e4m3fn).float() * scales[..., None]).to(dtype)
