"""Activations, gated or not, in float32. The result is rounded once; gated activations except swiglu_clamped also round
act(gate), as torch does."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Activation

_BLOCK = 1024


@triton.jit
def activated(x, limit, KIND: tl.constexpr):
    """Compute act(x) of a float32 tensor."""
    if KIND == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z), and 1.5958 is 2 sqrt(2 / π)
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "quick_gelu":
        x = x / (1.0 + tl.exp(-1.702 * x))
    elif KIND == "relu":
        x = tl.maximum(x, 0.0)
    elif KIND == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND == "clamp":
        x = tl.minimum(tl.maximum(x, -limit), limit)
    return x


@triton.jit
def gated(gate, up, limit, KIND: tl.constexpr, dtype: tl.constexpr):
    """Compute act(gate) · up of float32 tensors. act(gate) is first rounded to `dtype`, except for swiglu_clamped."""
    if KIND == "swiglu_clamped":
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return activated(gate, limit, KIND).to(dtype).to(tl.float32) * up


@triton.jit
def activation_kernel(
    x, output, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, IS_GATED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < WIDTH
    dtype: tl.constexpr = output.dtype.element_ty
    at = x + row * (2 * WIDTH if IS_GATED else WIDTH) + columns
    result = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(at + WIDTH, mask=exists, other=0.0).to(tl.float32)
        result = gated(result, up, limit, KIND, dtype)
    else:
        result = activated(result, limit, KIND)
    tl.store(output + row * WIDTH + columns, result.to(dtype), mask=exists)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Compute act(x) [T, n], or if gated act(gate) * up [T, n] of x [T, 2n], gates first. x is contiguous."""
    if activation.kind == "none" and not activation.is_gated:
        return x
    num_rows, width = x.shape[0], x.shape[1] // (2 if activation.is_gated else 1)
    output = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        activation_kernel[(num_rows, -(-width // _BLOCK))](
            x,
            output,
            float(activation.limit),
            WIDTH=width,
            BLOCK=_BLOCK,
            KIND=activation.kind,
            IS_GATED=activation.is_gated,
            num_warps=4,
        )
    return output
