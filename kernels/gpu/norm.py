"""Norms, alone or fused with the residual addition before them: one program per row, one pass.

The residual is stored after the reduction: several threads load the same element of a narrow row, and the reduction is
the barrier between those loads and the store.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Norm
from .launch import next_power_of_2

MAX_WIDTH = 1 << 15  # elements of a row; a program holds all of them in registers


@triton.jit
def norm_kernel(
    x, residual, weight, bias, output, x_stride, eps,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, IS_ADDED: tl.constexpr,
    KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH_PAD)
    exists = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=exists, other=0.0)
    if IS_ADDED:
        values += tl.load(residual + row * WIDTH + columns, mask=exists, other=0.0)
    wide = values.to(tl.float32)
    if KIND == "layer":
        wide = tl.where(exists, wide - tl.sum(wide, axis=0) / WIDTH, 0.0)
    normed = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps))
    if HAS_WEIGHT:
        normed *= tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias + columns, mask=exists, other=0.0).to(tl.float32)
    if IS_ADDED:
        tl.store(residual + row * WIDTH + columns, values, mask=exists)
    tl.store(output + row * WIDTH + columns, normed.to(output.dtype.element_ty), mask=exists)


def normalize(x: Tensor, residual: Tensor | None, norm: Norm) -> Tensor:
    """Return norm(x); with `residual` (contiguous), add x to it in place and return norm(residual). x: [T, n], last
    stride 1."""
    num_rows, width = x.shape
    output = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            x if norm.weight is None else norm.weight,
            x if norm.bias is None else norm.bias,
            output,
            x.stride(0),
            norm.eps,
            WIDTH=width,
            WIDTH_PAD=next_power_of_2(width),
            IS_ADDED=residual is not None,
            KIND=norm.kind,
            HAS_WEIGHT=norm.weight is not None,
            HAS_BIAS=norm.bias is not None,
            num_warps=4 if width <= 2048 else 8,
        )
    return output
