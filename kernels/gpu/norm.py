"""RMS norm, alone or fused with the residual addition before it: one program per row, one pass.

The residual is stored after the reduction: several threads load the same element of a narrow row, and the reduction is
the barrier between those loads and the store.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_2

MAX_WIDTH = 1 << 15  # elements of a row; a program holds all of them in registers


@triton.jit
def rms_norm_kernel(
    x, residual, weight, output, x_stride, eps, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, IS_ADDED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH_PAD)
    exists = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=exists, other=0.0)
    if IS_ADDED:
        values += tl.load(residual + row * WIDTH + columns, mask=exists, other=0.0)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    weights = tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    if IS_ADDED:
        tl.store(residual + row * WIDTH + columns, values, mask=exists)
    tl.store(output + row * WIDTH + columns, (wide * scale * weights).to(output.dtype.element_ty), mask=exists)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Compute rms_norm(x), or residual += x and rms_norm(residual). x: [T, n], last stride 1; residual: contiguous."""
    num_rows, width = x.shape
    output = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            output,
            x.stride(0),
            eps,
            WIDTH=width,
            WIDTH_PAD=next_power_of_2(width),
            IS_ADDED=residual is not None,
            num_warps=4 if width <= 2048 else 8,
        )
    return output
