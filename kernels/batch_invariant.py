"""BatchInvariantOps: the reference operations, with results that do not depend on the rest of the batch.

Matmuls, sums and exponentials may round differently for different shapes. Here each token passes through them alone,
and attention computes one query at a time. So a token's bits depend only on its own history, and not on batch, chunk,
prefix cache hit or retry. This is slow; it serves CPUs without C kernels, which are batch-invariant themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .contract import GateOrder, Norm
from .reference import PlainLinear, ReferenceOps
from .reference_state import gated_norm


class BatchInvariantOps(ReferenceOps):
    """The operations in plain torch on the CPU, one token at a time."""

    query_chunk_size = 1
    has_exact_drafts = True

    def adapted_linear(self, x: Tensor, packed: PlainLinear, token_slots: Tensor | None) -> Tensor:
        if token_slots is None:
            return _map_rows(lambda row: ReferenceOps.adapted_linear(self, row, packed, None), x)
        slots = iter(torch.split(token_slots, 1))  # without tokens a single empty part
        return _map_rows(lambda row: ReferenceOps.adapted_linear(self, row, packed, next(slots)), x)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return _map_rows(lambda row: ReferenceOps.norm(self, row, norm), x)

    @staticmethod
    def gated_norm(x: Tensor, gate: Tensor, norm: Norm | None, groups: int, order: GateOrder) -> Tensor:
        gates = iter(torch.split(gate, 1))
        return _map_rows(lambda row: gated_norm(row, next(gates), norm, groups, order), x)


def _map_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `function` to each row of x [T, …], copied to fresh memory because sums depend on its alignment."""
    if len(x) == 0:
        return function(x)
    return torch.cat([function(row.clone(memory_format=torch.contiguous_format)) for row in torch.split(x, 1)])
