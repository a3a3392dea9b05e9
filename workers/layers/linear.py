"""Linear layers that ranks share: by output columns (nothing is exchanged) or by input rows (results are summed).

A matrix in a checkpoint is [out, in]. Projections of the same input lie in one packed weight and cost one matmul.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.ops import Ops, PackedLinear
from ..parallel import ParallelGroup
from ..quantized_weights import load_matrix
from ..weights import Checkpoint, Piece


@dataclass(frozen=True)
class Projection:
    """One [num_outputs, in] matrix of a checkpoint, `name`.weight, of which this rank computes the outputs `share`."""

    name: str
    num_outputs: int
    share: range


class ColumnParallelLinear:
    """x [T, in] → [T, sum of the projections' shares], side by side in their order.

    Gated: silu of the first half times the second.
    """

    def __init__(self, ops: Ops, packed: PackedLinear) -> None:
        self._ops = ops
        self.packed = packed

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        ops: Ops,
        num_inputs: int,
        projections: list[Projection],
        has_bias: bool,
        is_gated: bool = False,
    ) -> ColumnParallelLinear:
        """`is_gated`: the second of two projections passes through the first, and half as many outputs are left."""
        weight = load_matrix(
            checkpoint, *(Piece(f"{p.name}.weight", (p.num_outputs, num_inputs), 0, p.share) for p in projections)
        )
        bias = None
        if has_bias:
            bias = checkpoint.load(*(Piece(f"{p.name}.bias", (p.num_outputs,), 0, p.share) for p in projections))
        return cls(ops, ops.pack_linear(weight, bias, is_gated))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.packed)


class RowParallelLinear:
    """x [T, this rank's share of in] → [T, out], summed over ranks and so equal on all of them."""

    def __init__(self, ops: Ops, group: ParallelGroup, packed: PackedLinear) -> None:
        self._ops = ops
        self._group = group
        self.packed = packed

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        ops: Ops,
        group: ParallelGroup,
        name: str,
        shape: tuple[int, int],
        share: range,
        has_bias: bool,
    ) -> RowParallelLinear:
        """`shape` is [out, in] of the whole matrix, `share` this rank's inputs."""
        weight = load_matrix(checkpoint, Piece(f"{name}.weight", shape, 1, share))
        bias = None
        if has_bias and group.rank == 0:  # once in the sum
            bias = checkpoint.load(Piece(f"{name}.bias", shape[:1]))
        return cls(ops, group, ops.pack_linear(weight, bias))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._ops.linear(x, self.packed))
