"""Decoding of blocks in GGUF's quantized formats, to codes, scales and mins of groups of inputs.

An element is code × scale − min. Layouts are those of ggml (ggml-org/ggml, src/ggml-common.h, ggml-quants.c).
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...ipc.spec.config.gguf_index import BLOCKS
from .gguf_grid_blocks import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs, nvfp4, tq1_0, tq2_0
from .mxfp4 import LEVELS

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # values of the 4-bit codes
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Groups(NamedTuple):
    """n blocks, each cut into groups of equal size."""

    codes: Tensor  # [n, groups, size] uint8 or int8
    scales: Tensor  # [n, groups] float32
    mins: Tensor | None  # [n, groups] float32; None: zeros
    levels: tuple[int, ...] | None = None  # values of the 4-bit codes; None: codes are their own values

    def dequantize(self) -> Tensor:
        """Return the elements, [n, groups, size] float32."""
        if self.levels is None:
            values = self.codes.float()
        else:
            values = torch.from_numpy(np.array(self.levels, np.float32).take(self.codes.numpy()))
        values *= self.scales[..., None]
        return values if self.mins is None else values.sub_(self.mins[..., None])


def read_groups(kind: str, blocks: Tensor) -> Groups:
    """Return quantized blocks as groups. kind: GGUF's name of the format. blocks: [n, bytes of a block] uint8."""
    assert blocks.shape[1] == BLOCKS[kind][1]
    return _READERS[kind](blocks)


def dequantize(kind: str, data: Tensor) -> Tensor:
    """Return the elements of rows: data [rows, bytes] uint8 → [rows, elements] float32, or in the stored float
    dtype."""
    if kind in FLOATS:
        return data.view(FLOATS[kind])
    blocks = data.reshape(-1, BLOCKS[kind][1])
    return read_groups(kind, blocks).dequantize().reshape(len(data), -1)


def _half(data: Tensor) -> Tensor:
    """Read float16 numbers, [n, 2 c] uint8 → [n, c] float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, run: int) -> Tensor:
    """Return 4-bit codes [n, 2 b] of bytes [n, b]: for each `run` bytes first all low halves, then all high halves."""
    runs = data.unflatten(1, (-1, 1, run))
    return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)


def _bits(data: Tensor, width: int, run: int) -> Tensor:
    """Return codes of `width` bits [n, b × 8 / width] of bytes [n, b]: for each `run` bytes first the lowest bits of
    all these bytes, then the next bits, and so on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    shifted: Tensor = data.unflatten(1, (-1, 1, run)) >> shifts
    return (shifted & ((1 << width) - 1)).flatten(1)


def _q4_0(data: Tensor) -> Groups:
    codes = _nibbles(data[:, 2:], 16).view(torch.int8) - 8
    return Groups(codes[:, None], _half(data[:, :2]), None)


def _q4_1(data: Tensor) -> Groups:
    return Groups(_nibbles(data[:, 4:], 16)[:, None], _half(data[:, :2]), -_half(data[:, 2:4]))


def _fifth_bits(data: Tensor) -> Tensor:
    """Return bit i of each row of 4 bytes, times 16, as element i: [n, 4] → [n, 32]."""
    return (data[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _q5_0(data: Tensor) -> Groups:
    codes = (_nibbles(data[:, 6:], 16) | _fifth_bits(data[:, 2:6])).view(torch.int8) - 16
    return Groups(codes[:, None], _half(data[:, :2]), None)


def _q5_1(data: Tensor) -> Groups:
    codes = _nibbles(data[:, 8:], 16) | _fifth_bits(data[:, 4:8])
    return Groups(codes[:, None], _half(data[:, :2]), -_half(data[:, 2:4]))


def _q8_0(data: Tensor) -> Groups:
    return Groups(data[:, None, 2:].view(torch.int8), _half(data[:, :2]), None)


def _q2_k(data: Tensor) -> Groups:
    scales, halves = data[:, :16], _half(data[:, 80:84])
    codes = _bits(data[:, 16:80], 2, 32).unflatten(1, (16, 16))
    return Groups(codes, halves[:, :1] * (scales & 15), halves[:, 1:] * (scales >> 4))


def _q3_k(data: Tensor) -> Groups:
    low, high = _nibbles(data[:, 96:104], 8), _bits(data[:, 104:108], 2, 4)
    scales = (low | high << 4).view(torch.int8) - 32
    codes = (_bits(data[:, 32:96], 2, 32) | _bits(data[:, :32], 1, 32) << 2).view(torch.int8) - 4
    return Groups(codes.unflatten(1, (16, 16)), _half(data[:, 108:]) * scales, None)


def _k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the mins of 8 groups, each [n, 8] float32, from [n, 16] bytes: two floats, by which numbers
    of 6 bits are multiplied."""
    halves, first, second, last = _half(data[:, :4]), data[:, 4:8], data[:, 8:12], data[:, 12:]
    scales = torch.cat((first & 63, last & 15 | first >> 6 << 4), dim=1)
    mins = torch.cat((second & 63, last >> 4 | second >> 6 << 4), dim=1)
    return halves[:, :1] * scales, halves[:, 1:] * mins


def _q4_k(data: Tensor) -> Groups:
    return Groups(_nibbles(data[:, 16:], 32).unflatten(1, (8, 32)), *_k_scales(data[:, :16]))


def _q5_k(data: Tensor) -> Groups:
    codes = _nibbles(data[:, 48:], 32) | _bits(data[:, 16:48], 1, 32) << 4
    return Groups(codes.unflatten(1, (8, 32)), *_k_scales(data[:, :16]))


def _q6_k(data: Tensor) -> Groups:
    codes = (_nibbles(data[:, :128], 64) | _bits(data[:, 128:192], 2, 32) << 4).view(torch.int8) - 32
    return Groups(codes.unflatten(1, (16, 16)), _half(data[:, 208:]) * data[:, 192:208].view(torch.int8), None)


def _iq4_nl(data: Tensor) -> Groups:
    return Groups(_nibbles(data[:, 2:], 16)[:, None], _half(data[:, :2]), None, IQ4)


def _iq4_xs(data: Tensor) -> Groups:
    low = torch.stack((data[:, 4:8] & 15, data[:, 4:8] >> 4), dim=2).flatten(1)
    high = (data[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    return Groups(_nibbles(data[:, 8:], 16).unflatten(1, (8, 32)), _half(data[:, :2]) * scales, None, IQ4)


def _mxfp4(data: Tensor) -> Groups:
    exponents = data[:, :1].float() - 128  # e8m0; scales are halved, because LEVELS are doubled
    return Groups(_nibbles(data[:, 1:], 16)[:, None], torch.exp2(exponents), None, LEVELS)


_READERS: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "IQ1_S": lambda data: Groups(*iq1_s(data), None),
    "IQ1_M": lambda data: Groups(*iq1_m(data), None),
    "IQ2_XXS": lambda data: Groups(*iq2_xxs(data), None),
    "IQ2_XS": lambda data: Groups(*iq2_xs(data), None),
    "IQ2_S": lambda data: Groups(*iq2_s(data), None),
    "IQ3_XXS": lambda data: Groups(*iq3_xxs(data), None),
    "IQ3_S": lambda data: Groups(*iq3_s(data), None),
    "TQ1_0": lambda data: Groups(*tq1_0(data), None),
    "TQ2_0": lambda data: Groups(*tq2_0(data), None),
    "NVFP4": lambda data: Groups(*nvfp4(data), None, LEVELS),
}
