"""Least-squares fit of 4-bit codes, a scale and a zero to each group of inputs of a matrix, in plain torch.

An element is near (code - zero) * scale. Zeros are fractions of a code, so that the 16 levels begin near the group's
smallest element, which whole zeros would miss by up to half a code. kernels/cpu/four_bits.c does the same: every sum is
made in a stated order, and each operation is rounded once, so that both give the same bits on every device.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MAX_CODE = 15
GROUP = 32  # number of inputs that share a scale and a zero
ZERO_STEPS = 8  # zeros are stored as a number of steps; bfloat16 holds (code * ZERO_STEPS - zero) / ZERO_STEPS
CUTS = (-0.02, 0.02, 0.06)  # parts of a group's range that a first grid leaves out at either end
NUM_ROUNDS = 3  # grids tried for each pair of cuts
SLICE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements that are fitted at a time
SCALES = (2.0**-24, 65504.0)  # smallest and largest one of float16


def fitted_slices(weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Fit weight [out, in], with whole groups in each row, some rows at a time. Yield the rows, their codes [rows, in]
    uint8, scales [rows, groups] float32 that float16 holds, and zeros [rows, groups] uint8 in steps."""
    num_rows, num_inputs = weight.shape
    step = max(SLICE_ELEMENTS.get(weight.device.type, 1 << 24) // max(num_inputs, 1), 1)
    for first in range(0, num_rows, step):
        part = weight[first : first + step].float()
        columns = part.reshape(-1, GROUP).T.contiguous()
        scales, zeros = _fit(columns)
        codes = _codes(columns, scales, zeros).nan_to_num(0).to(torch.uint8).T.reshape(part.shape)
        steps = (zeros * ZERO_STEPS).to(torch.uint8)
        yield slice(first, first + len(part)), codes, scales.view(len(part), -1), steps.view(len(part), -1)


def _fit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero of each column of x [GROUP, n]; a column with an infinity or NaN has the scale NaN.

    Each pair of cuts gives a first grid. A round assigns codes by the grid, compares its squared error with the least
    one so far, and makes the next grid from these codes by least squares.
    """
    least = x.amin(0).clamp(max=0)
    width = x.amax(0).clamp(min=0) - least
    sum_x = _sum(x)
    best_error = torch.full_like(least, torch.inf)
    best_scale = torch.full_like(least, torch.nan)
    best_zero = torch.zeros_like(least)
    for low in CUTS:
        for high in CUTS:
            scale = _half(width * ((1 - low - high) / MAX_CODE))
            zero = _whole_steps((width * low + least) * (1 / scale) * -ZERO_STEPS)
            for _ in range(NUM_ROUNDS):
                codes = _codes(x, scale, zero)
                sum_codes = codes.sum(0)
                sum_squares = (codes * codes).sum(0)
                sum_products = _sum(x * codes)
                # of (code - zero) * scale - x, without the sum of x * x, which is the same for all grids
                squares = sum_squares - zero * (2 * sum_codes) + zero * zero * GROUP
                error = (squares * scale - (sum_products - zero * sum_x) * 2) * scale
                is_better = error <= best_error
                best_error = torch.where(is_better, error, best_error)
                best_scale, best_zero = (
                    torch.where(is_better, scale, best_scale),
                    torch.where(is_better, zero, best_zero),
                )
                spread = sum_squares * GROUP - sum_codes * sum_codes  # 0 if all codes are equal
                slope = (sum_products * GROUP - sum_x * sum_codes) / spread.clamp(min=1)
                scale = torch.where(spread > 0, _half(slope), scale)
                zero = _whole_steps((sum_codes - sum_x * (1 / scale)) * (ZERO_STEPS / GROUP))
    is_finite = x.isfinite().all(0)
    return torch.where(is_finite, best_scale, torch.nan), torch.where(is_finite, best_zero, 0)


def _codes(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (x * (1 / scale) + zero).clamp_(0, MAX_CODE).round_()


def _half(scale: Tensor) -> Tensor:
    return scale.clamp(*SCALES).half().float()


def _whole_steps(steps: Tensor) -> Tensor:
    """Return the zero that is nearest to a number of steps."""
    return steps.clamp(0, 255).round() / ZERO_STEPS


def _sum(x: Tensor) -> Tensor:
    """Sum x [GROUP, n] over its rows: four sums of each fourth row, then these in pairs."""
    parts = x.unflatten(0, (-1, 4))
    sums = parts[0]
    for part in parts[1:]:
        sums = sums + part
    pairs: Tensor = sums[:2] + sums[2:]
    return pairs[0] + pairs[1]
