"""Batch-invariant matrix product: the bits of a row do not depend on the other rows.

All batch sizes use one tile shape, and one program accumulates the whole inner dimension in order. It is slower than
cuBLAS, which chooses tiles and splits by the number of rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .matmul import MatmulShape


def linear_shape(element_size: int) -> MatmulShape:
    """Choose the tile shape by the bytes of an element only, so that results do not depend on the number of rows."""
    if element_size > 2:  # no tensor cores
        return MatmulShape(16, 32, 32, num_warps=4, num_stages=2)
    return MatmulShape(64, 128, 64, num_warps=4, num_stages=4)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,  # [num_rows, INPUTS], rows x_stride apart
    weight,  # [num_outputs, INPUTS]
    bias,  # [num_outputs]
    output,  # [num_rows, num_outputs]
    num_rows,
    num_outputs,
    x_stride,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    steps = tl.arange(0, INNER)
    is_row, is_column = (rows < num_rows)[:, None], (columns < num_outputs)[None, :]
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, INPUTS, INNER):
        inner = start + steps
        left = tl.load(
            x + rows[:, None] * x_stride + inner[None, :], mask=is_row & (inner < INPUTS)[None, :], other=0.0
        )
        right = tl.load(
            weight + columns[None, :] * INPUTS + inner[:, None], mask=is_column & (inner < INPUTS)[:, None], other=0.0
        )
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < num_outputs, other=0.0).to(tl.float32)[None, :]
    at = output + rows[:, None] * num_outputs + columns[None, :]
    tl.store(at, acc.to(output.dtype.element_ty), mask=is_row & is_column)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply x [T, in] (rows may be strided) by weight [out, in] and add bias: [T, out] of `dtype`."""
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    output = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    shape = linear_shape(x.element_size())
    if num_rows:
        linear_kernel[(triton.cdiv(num_rows, shape.block_m), triton.cdiv(num_outputs, shape.block_n))](
            x,
            weight,
            weight if bias is None else bias,
            output,
            num_rows,
            num_outputs,
            x.stride(0),
            INPUTS=num_inputs,
            ROWS=shape.block_m,
            OUTPUTS=shape.block_n,
            INNER=shape.block_k,
            HAS_BIAS=bias is not None,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    return output
