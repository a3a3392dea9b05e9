"""RMSNorm over the last axis, alone or with the residual addition that comes before it in a decoder."""

from __future__ import annotations

from torch import Tensor

from ...kernels.ops import Ops
from ..weights import Checkpoint, Piece


class RMSNorm:
    """x / rms(x) * weight; every rank holds the whole weight."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self.weight = weight
        self.eps = eps

    @classmethod
    def load(cls, checkpoint: Checkpoint, ops: Ops, name: str, size: int, eps: float) -> RMSNorm:
        return cls(ops, checkpoint.load(Piece(f"{name}.weight", (size,))), eps)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x, then its norm."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
