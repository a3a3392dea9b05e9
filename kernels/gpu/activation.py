"""The gated activation silu(gate) * up of a projection [gate | up]."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """Compute silu(gate) · up in float32, with silu rounded to the model's dtype first, as in torch."""
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit
def silu_and_mul_kernel(x, output, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < WIDTH
    gate = tl.load(x + row * (2 * WIDTH) + columns, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * WIDTH) + WIDTH + columns, mask=exists, other=0.0).to(tl.float32)
    dtype: tl.constexpr = output.dtype.element_ty
    tl.store(output + row * WIDTH + columns, silu_mul(gate, up, dtype).to(dtype), mask=exists)


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute silu(gate) * up [T, n] of x [T, 2n], contiguous, gates first."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    output = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        grid = (num_rows, -(-width // _BLOCK))
        silu_and_mul_kernel[grid](x, output, WIDTH=width, BLOCK=_BLOCK, num_warps=4)
    return output
