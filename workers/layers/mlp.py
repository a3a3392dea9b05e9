"""The gated feed-forward block: down(silu(gate(x)) * up(x)), split between ranks along its inner size."""

from __future__ import annotations

from torch import Tensor

from ..weights.loader import LayerLoader, Projection


class GatedMLP:
    """Block x [T, hidden_size] → [T, hidden_size], summed over ranks."""

    def __init__(
        self, loader: LayerLoader, name: str, hidden_size: int, intermediate_size: int, has_bias: bool
    ) -> None:
        self._ops, self._group = loader.ops, loader.group
        shard = loader.group.shard(intermediate_size, "elements of intermediate_size")
        projections = [Projection(f"{name}.{each}", intermediate_size, shard) for each in ("gate_proj", "up_proj")]
        self.gate_up = loader.column_parallel(hidden_size, projections, has_bias, is_gated=True)
        self.down = loader.row_parallel(f"{name}.down_proj", (hidden_size, intermediate_size), shard, has_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._ops.linear(self._ops.linear(x, self.gate_up), self.down))
