"""Rounding to Q4_K in numpy, as llama.cpp does it without an importance matrix.

A block of 256 inputs has 8 groups of 32. An element is scale * code - min, where scale and min of a group are 6-bit
multiples of two half-precision numbers of the block. gguf-py reads the format and cannot write it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GROUP, GROUPS = 32, 8
NUM_TRIES = 21  # grids of 14 to 16 steps over the range of a group

Floats = NDArray[np.float32]


def round_to_q4_k(weight: Floats) -> Floats:
    """Return the elements that Q4_K holds for a weight [out, in], whose `in` is a multiple of 256."""
    x = weight.reshape(-1, GROUPS, GROUP).astype(np.float32)
    scales, mins = _fitted_grids(x)
    largest_scale, largest_min = scales.max(1, keepdims=True), mins.max(1, keepdims=True)
    scales, mins = _in_six_bits(scales, largest_scale)[..., None], _in_six_bits(mins, largest_min)[..., None]
    codes = np.round((x + mins) / np.where(scales > 0, scales, 1)).clip(0, 15)
    return np.where(scales > 0, scales * codes - mins, -mins).reshape(weight.shape).astype(np.float32)


def _in_six_bits(values: Floats, largest: Floats) -> Floats:
    """Round values to multiples, at most 63, of a 63rd of the largest one in half precision."""
    multiples = np.round(values * 63 / np.where(largest > 0, largest, 1)).clip(0, 63)
    return multiples.astype(np.float32) * (largest / 63).astype(np.float16).astype(np.float32)


def _fitted_grids(x: Floats) -> tuple[Floats, Floats]:
    """Return the scale and the min of each group: of the grids that are fitted to the codes of some tries, the one with
    the least error. Larger elements weigh more."""
    weights = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    low, high = np.minimum(x.min(-1, keepdims=True), 0), x.max(-1, keepdims=True)
    is_flat = high <= low
    best_low: Floats = low
    best_scale = (np.where(is_flat, 1, high - low) / 15).astype(np.float32)
    best_error = _error(x, weights, np.round((x - low) / best_scale).clip(0, 15), best_scale, low)
    total, sum_x = weights.sum(-1, keepdims=True), (weights * x).sum(-1, keepdims=True)
    for tried in range(NUM_TRIES):
        width = np.where(is_flat, 1, high - best_low)  # a try begins at the least level of the best one before
        codes = np.round((x - best_low) * ((14 + 0.1 * tried) / width)).clip(0, 15)
        weighted = weights * codes
        sum_codes, sum_squares = weighted.sum(-1, keepdims=True), (weighted * codes).sum(-1, keepdims=True)
        sum_products = (weighted * x).sum(-1, keepdims=True)
        spread = total * sum_squares - sum_codes**2
        divisor = np.where(spread > 0, spread, 1)
        scale = (total * sum_products - sum_x * sum_codes) / divisor
        begin = (sum_squares * sum_x - sum_codes * sum_products) / divisor
        alone = sum_products / np.where(sum_squares > 0, sum_squares, 1)  # a min is never negative
        scale, begin = np.where(begin > 0, alone, scale), np.minimum(begin, 0)
        error = _error(x, weights, codes, scale, begin)
        is_better = (spread > 0) & (error < best_error)
        best_error = np.where(is_better, error, best_error)
        best_scale, best_low = np.where(is_better, scale, best_scale), np.where(is_better, begin, best_low)
    return np.where(is_flat, 0, best_scale)[..., 0], -best_low[..., 0]


def _error(x: Floats, weights: Floats, codes: Floats, scale: Floats, low: Floats) -> Floats:
    found: Floats = (weights * (scale * codes + low - x) ** 2).sum(-1, keepdims=True)
    return found
