"""BatchInvariantOps: the reference with the same bits for a token whatever it is computed together with.

A matmul, a sum or an exponential may round differently with the shape that it runs in. Here each token goes through
them alone, and attention takes one query at a time over its own context. So a token's result depends on its own history
alone: not on batch, chunk, prefix hit or attempt. That is slow: for where there are no kernels (the C ones take each
row by itself anyway).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .contract import PackedLinear
from .reference import ReferenceOps


class BatchInvariantOps(ReferenceOps):
    """For the CPU."""

    queries_at_once = 1

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return _one_by_one(lambda row: ReferenceOps.linear(self, row, packed), x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _one_by_one(lambda row: ReferenceOps.rms_norm(self, row, weight, eps), x)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)


def _one_by_one(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` over x [T, …] in calls of one row, which lies where any other would: sums depend on alignment."""
    if len(x) == 0:
        return function(x)
    return torch.cat([function(row.clone(memory_format=torch.contiguous_format)) for row in torch.split(x, 1)])
