"""Decoding of blocks of the formats IQ1, IQ2, IQ3, TQ1, TQ2 and NVFP4 of GGUF, to codes and scales of groups of inputs.

A code of IQ1 to IQ3 is the index of a run of values in a grid. Runs are looked up and get their signs as whole words,
eight values at a time. An element of IQ1 is scale × (value ± 1/8), in codes of eighths.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .gguf_grids import grid_of

ONES = np.uint64(0x0101010101010101)  # 1 in each byte of a word
_BITS = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1
_MASKS = (_BITS * np.uint8(255)).view(np.uint64)[:, 0]  # by byte: all bits of value i, if bit i is set
_SIGNS = np.arange(128, dtype=np.uint8) | (_BITS[:128].sum(1) & 1).astype(np.uint8) << 7  # the eighth makes them even
_EXPONENTS, _MANTISSAS = np.arange(256) >> 3 & 15, np.arange(256) & 7
_HALVED = np.where(_EXPONENTS == 0, _MANTISSAS / 8, 1 + _MANTISSAS / 8) * 2.0 ** (np.maximum(_EXPONENTS, 1) - 8)
_HALVED = np.where(np.arange(256) == 127, 0, _HALVED).astype(np.float32)  # half of a number in e4m3 without a sign


def iq2_xxs(data: Tensor) -> tuple[Tensor, Tensor]:
    blocks = data.numpy()
    words = _numbers(blocks[:, 2:], np.uint32).reshape(len(blocks), 8, 2)
    codes = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    scales = _half(blocks[:, :2]) * _tensor(words[:, :, 1] >> 28).add(0.5) * 0.25
    return _signed(grid_of("IQ2_XXS").take(codes), _packed_signs(words[:, :, 1]), 8), scales


def iq2_xs(data: Tensor) -> tuple[Tensor, Tensor]:
    blocks = data.numpy()
    codes = _numbers(blocks[:, 2:66], np.uint16)
    scales = _half(blocks[:, :2]) * _tensor(_nibbles(blocks[:, 66:])).add(0.5) * 0.25
    return _signed(grid_of("IQ2_XS").take(codes & 511), _SIGNS.take(codes >> 9), 16), scales


def iq2_s(data: Tensor) -> tuple[Tensor, Tensor]:
    blocks = data.numpy()
    codes = blocks[:, 2:34] | _parts(blocks[:, 66:74], 2).astype(np.uint16) << 8
    scales = _half(blocks[:, :2]) * _tensor(_nibbles(blocks[:, 74:])).add(0.5) * 0.25
    return _signed(grid_of("IQ2_S").take(codes), blocks[:, 34:66], 16), scales


def iq3_xxs(data: Tensor) -> tuple[Tensor, Tensor]:
    blocks = data.numpy()
    words = _numbers(blocks[:, 66:], np.uint32)
    scales = _half(blocks[:, :2]) * _tensor(words >> 28).add(0.5) * 0.5
    pairs = grid_of("IQ3_XXS").take(blocks[:, 2:66]).view(np.uint64)
    return _signed(pairs, _packed_signs(words), 8), scales


def iq3_s(data: Tensor) -> tuple[Tensor, Tensor]:
    blocks = data.numpy()
    codes = blocks[:, 2:66] | _parts(blocks[:, 66:74], 1).astype(np.uint16) << 8
    scales = _half(blocks[:, :2]) * _tensor(1 + 2 * _nibbles(blocks[:, 106:]))
    return _signed(grid_of("IQ3_S").take(codes).view(np.uint64), blocks[:, 74:106], 8), scales


def iq1_s(data: Tensor) -> tuple[Tensor, Tensor]:
    blocks = data.numpy()
    high = _numbers(blocks[:, 34:], np.uint16)
    codes = blocks[:, 2:34] | (_parts(high, 3, 4) & 7) << 8
    scales = _half(blocks[:, :2]) * _tensor(2 * (high >> 12 & 7) + 1)
    return _eighths(codes, (high >> 15).repeat(4, 1), 8), scales / 8


def iq1_m(data: Tensor) -> tuple[Tensor, Tensor]:
    blocks = data.numpy()
    high, stored = _nibbles(blocks[:, 32:48]), _numbers(blocks[:, 48:], np.uint16)
    codes = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    bits = np.bitwise_or.reduce(stored >> 12 << np.arange(0, 16, 4, dtype=np.uint16), axis=1, keepdims=True)
    factors = _tensor(2 * (_parts(stored, 3, 4) & 7) + 1)
    scales = _half(bits.astype(np.uint16)) * factors
    return _eighths(codes, high >> 3, 16), scales / 8


def tq1_0(data: Tensor) -> tuple[Tensor, Tensor]:
    """Five, and in the last bytes four, codes of base 3 are a fraction of 256 each."""
    blocks, powers = data.numpy(), np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    runs = [(blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    digits = np.concatenate([(run[:, None] * powers[:count]).reshape(len(run), -1) for run, count in runs], axis=1)
    codes = (digits.astype(np.uint16) * 3 >> 8).astype(np.int8) - np.int8(1)
    return _groups(codes, 8), _half(blocks[:, 52:]).repeat(1, 8)


def tq2_0(data: Tensor) -> tuple[Tensor, Tensor]:
    blocks = data.numpy()
    runs = blocks[:, :64].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return _groups(runs.astype(np.int8) - np.int8(1), 8), _half(blocks[:, 64:]).repeat(1, 8)


def nvfp4(data: Tensor) -> tuple[Tensor, Tensor]:
    """The codes are indices of twice the values of 4 bits; scales have a byte."""
    blocks = data.numpy()
    runs = blocks[:, 4:].reshape(-1, 4, 8)
    return torch.from_numpy(np.concatenate([runs & 15, runs >> 4], axis=2)), _tensor(_HALVED.take(blocks[:, :4]))


def _half(stored: Any) -> Tensor:
    return torch.from_numpy(_numbers(stored, np.float16)).float()


def _numbers(stored: Any, dtype: type) -> Any:
    return np.ascontiguousarray(stored).view(dtype)


def _parts(stored: Any, width: int, count: int = 0) -> Any:
    """Cut numbers [n, m] into parts of `width` bits, the lowest first: [n, m × parts]."""
    count = count or 8 // width
    shifts = np.arange(0, width * count, width, dtype=stored.dtype)
    parts = stored[:, :, None] >> shifts
    if stored.dtype == np.uint8:
        parts &= np.uint8((1 << width) - 1)
    return parts.reshape(len(stored), -1)


def _nibbles(stored: Any) -> Any:
    return _parts(stored, 4)


def _packed_signs(words: Any) -> Any:
    """Return the signs of four runs from the low 28 bits of each word: bytes [n, 4 m]."""
    shifts = np.arange(0, 28, 7, dtype=np.uint32)
    return _SIGNS.take(words[:, :, None] >> shifts & 127).reshape(len(words), -1)


def _signed(runs: Any, signs: Any, num_groups: int) -> Tensor:
    """Negate value i of a word if bit i of its byte of signs is set; no value is 0. runs: any shape of uint64."""
    masks = _MASKS.take(signs).reshape(runs.shape)
    return _groups(((runs ^ masks) + (masks & ONES)).view(np.int8).reshape(len(signs), -1), num_groups)


def _eighths(codes: Any, is_below: Any, num_groups: int) -> Tensor:
    """Return 8 × the values of IQ1's grid, plus 1 or, for runs that are below, minus 1."""
    values = grid_of("IQ1_S").take(codes).view(np.int8).reshape(*codes.shape, 8)
    shift = np.int8(1) - np.int8(2) * is_below.astype(np.int8)
    return _groups(values * np.int8(8) + shift[:, :, None], num_groups)


def _groups(codes: Any, num_groups: int) -> Tensor:
    return torch.from_numpy(codes.reshape(-1, num_groups, 256 // num_groups))


def _tensor(numbers: Any) -> Tensor:
    return torch.from_numpy(numbers.astype(np.float32))
