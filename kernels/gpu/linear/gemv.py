"""Matrix-vector product of one token, with the activation in the same launch.

A program computes a few outputs. Its threads divide the inputs and keep separate sums until the end, so that all
loads of an iteration are in flight at once. A single token is bound by reading the weights and by launches; for more
rows cuBLAS is faster.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import NO_ACTIVATION, Activation
from ..activation import activated, gated
from ..launch import next_power_of_2

WEIGHTS = 8192  # weights per program and iteration: in bfloat16 16 KB, eight loads of 16 bytes for each thread
MAX_INNER = 4096  # the most inputs per iteration: many small programs leave no multiprocessor idle at the end


@triton.jit
def add_products(total, x, weight, rows, is_row, start, INPUTS: tl.constexpr, INNER: tl.constexpr):
    """Add the products of the inputs from `start` on with these rows of the matrix to total [OUTPUTS, INNER]."""
    inner = start + tl.arange(0, INNER)
    is_input = inner < INPUTS
    weights = tl.load(
        weight + rows[:, None] * INPUTS + inner[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
    )
    values = tl.load(x + inner, mask=is_input, other=0.0)
    return total + weights.to(tl.float32) * values.to(tl.float32)[None, :]


@triton.jit
def reduce_outputs(total, bias, rows, is_row, HAS_BIAS: tl.constexpr):
    """Sum total [OUTPUTS, INNER] over the inputs and add the bias."""
    sums = tl.sum(total, axis=1)
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["num_outputs"])
def gemv_kernel(
    x,  # [INPUTS]
    weight,  # [num_outputs, INPUTS]; if gated [2 * num_outputs, INPUTS], gates first
    bias,  # [num_outputs] or [2 * num_outputs]
    output,  # [num_outputs]
    num_outputs,
    limit,  # Activation.limit
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty if IS_ROUNDED else tl.float32
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = columns < num_outputs
    rows = columns.to(tl.int64)
    total = tl.zeros([OUTPUTS, INNER], tl.float32)
    gates = tl.zeros([OUTPUTS, INNER], tl.float32)
    if IS_GATED:
        rows += num_outputs
    for start in range(0, INPUTS, INNER):
        if IS_GATED:
            gates = add_products(gates, x, weight, rows - num_outputs, is_row, start, INPUTS, INNER)
        total = add_products(total, x, weight, rows, is_row, start, INPUTS, INNER)
    result = reduce_outputs(total, bias, rows, is_row, HAS_BIAS).to(dtype)
    if IS_GATED:
        gate = reduce_outputs(gates, bias, rows - num_outputs, is_row, HAS_BIAS).to(dtype)
        result = gated(gate.to(tl.float32), result.to(tl.float32), limit, KIND, dtype).to(dtype)
    elif KIND != "none":
        result = activated(result.to(tl.float32), limit, KIND).to(dtype)
    tl.store(output + columns, result.to(output.dtype.element_ty), mask=is_row)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: Activation = NO_ACTIVATION,
    *,
    is_rounded: bool = True,
) -> Tensor:
    """Multiply dense x [1, in] by weight [out, in], add the bias and apply the activation: [1, out] in `dtype`, or
    [1, out / 2] if gated. With `is_rounded`, values are rounded to x's dtype before and after the activation."""
    num_parts = 2 if activation.is_gated else 1
    num_inputs, num_outputs = x.shape[1], weight.shape[0] // num_parts
    output = torch.empty((1, num_outputs), dtype=dtype, device=x.device)
    inner = min(MAX_INNER, next_power_of_2(num_inputs))
    outputs = WEIGHTS // inner // num_parts
    gemv_kernel[(-(-num_outputs // outputs),)](
        x,
        weight,
        weight if bias is None else bias,
        output,
        num_outputs,
        float(activation.limit),
        INPUTS=num_inputs,
        OUTPUTS=outputs,
        INNER=inner,
        HAS_BIAS=bias is not None,
        KIND=activation.kind,
        IS_GATED=activation.is_gated,
        IS_ROUNDED=is_rounded,
        num_warps=4,
    )
    return output
