"""Decoding of MXFP4: 4-bit floats (e2m1) in groups of 32, each with a power of two as its scale.

Format: Open Compute Project, Microscaling Formats (MX) specification 1.0, section 5.3.3. A byte of a block holds two
codes, the first in its low bits. A scale s (e8m0) is 2 ** (s − 127); 255 is NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...kernels.quantized import QuantizedWeight, pack_halves

GROUP_SIZE = 32  # codes per scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))  # by code; the highest bit is the sign
LEVELS = tuple(int(2 * value) for value in _VALUES)  # doubled, so that they are integers
_PAIRS = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)])
_SCALES = torch.tensor([*(2.0 ** (scale - 127) for scale in range(255)), math.nan])


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values [..., 32 * groups] of blocks [..., groups, 16] uint8 with scales [..., groups] uint8.

    The result is exact in bfloat16 and float32.
    """
    values = _PAIRS.to(blocks.device)[blocks.int()].flatten(-2)  # [..., groups, 32]
    return values.mul_(_SCALES.to(scales.device)[scales.int()][..., None]).flatten(-2).to(dtype)


def as_codes(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Return the matrix [out, 32 * groups] of blocks [out, groups, 16] with scales [out, groups] as codes of LEVELS.
    `dtype`: dtype of products with the matrix."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    halved = _SCALES.to(scales.device)[scales.int()] / 2
    return QuantizedWeight(pack_halves(codes), halved, None, GROUP_SIZE, None, dtype, None, LEVELS)
