"""The gated feed-forward block: down(silu(gate(x)) * up(x)), split between ranks along its inner size."""

from __future__ import annotations

from torch import Tensor

from ...kernels.ops import Ops
from ..parallel import ParallelGroup
from ..weights import Checkpoint
from .linear import ColumnParallelLinear, Projection, RowParallelLinear


class GatedMLP:
    """x [T, hidden_size] → [T, hidden_size]."""

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear) -> None:
        self.gate_up = gate_up
        self.down = down

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        ops: Ops,
        group: ParallelGroup,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        has_bias: bool,
    ) -> GatedMLP:
        share = group.share(intermediate_size, "elements of intermediate_size")
        projections = [
            Projection(f"{name}.gate_proj", intermediate_size, share),
            Projection(f"{name}.up_proj", intermediate_size, share),
        ]
        gate_up = ColumnParallelLinear.load(checkpoint, ops, hidden_size, projections, has_bias, is_gated=True)
        down = RowParallelLinear.load(
            checkpoint, ops, group, f"{name}.down_proj", (hidden_size, intermediate_size), share, has_bias
        )
        return cls(gate_up, down)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))
