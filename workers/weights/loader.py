"""LayerLoader: loads this rank's shard of the parameters of layers and packs it for the kernels.

A matrix in a checkpoint is [out, in]. A column-parallel layer shards its outputs and needs no communication; a
row-parallel layer shards its inputs, and the ranks' results are summed. Projections of the same input are packed into
one weight and one matmul.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.contract import PackedExperts, PackedLinear
from ...kernels.quantized import Weight
from ...kernels.select import Ops
from ..parallel import ParallelGroup
from .checkpoint import Checkpoint, TensorSlice
from .quantized_weights import load_matrix


@dataclass(frozen=True)
class Projection:
    """A [num_outputs, in] matrix of a checkpoint, `name`.weight; this rank computes the outputs `shard`."""

    name: str
    num_outputs: int
    shard: range


class LayerLoader:
    """Reads from an open checkpoint. `num_bytes`: memory of the parameters returned so far, without `vocabulary`."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, group: ParallelGroup) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self.group = group
        self.num_bytes = 0

    def column_parallel(
        self, num_inputs: int, projections: list[Projection], has_bias: bool, is_gated: bool = False
    ) -> PackedLinear:
        """Load one layer of all `projections`: x [T, in] → [T, sum of their shards], in their order.

        `is_gated`: the first of two projections gates the second, which halves the outputs.
        """
        weights = (TensorSlice(f"{p.name}.weight", (p.num_outputs, num_inputs), 0, p.shard) for p in projections)
        biases = (TensorSlice(f"{p.name}.bias", (p.num_outputs,), 0, p.shard) for p in projections)
        bias = self.checkpoint.load(*biases) if has_bias else None
        return self.pack(load_matrix(self.checkpoint, *weights), bias, is_gated)

    def row_parallel(self, name: str, shape: tuple[int, int], shard: range, has_bias: bool) -> PackedLinear:
        """Load the layer x [T, `shard` of in] → [T, out], to be summed over ranks: only rank 0 has the bias. `shape`:
        [out, in] of the whole matrix."""
        weight = load_matrix(self.checkpoint, TensorSlice(f"{name}.weight", shape, 1, shard))
        bias = None
        if has_bias and self.group.rank == 0:  # added once to the sum
            bias = self.checkpoint.load(TensorSlice(f"{name}.bias", shape[:1]))
        return self.pack(weight, bias)

    def pack(self, weight: Weight, bias: Tensor | None = None, is_gated: bool = False) -> PackedLinear:
        packed = self.ops.pack_linear(weight, bias, is_gated)
        self.num_bytes += packed.nbytes
        return packed

    def pack_experts(self, gate_up: list[Weight], down: list[Weight]) -> PackedExperts:
        packed = self.ops.pack_experts(gate_up, down)
        self.num_bytes += packed.nbytes
        return packed

    def vector(self, name: str, size: int) -> Tensor:
        """Load `name`.weight [size], unsharded."""
        weight = self.checkpoint.load(TensorSlice(f"{name}.weight", (size,)))
        self.num_bytes += weight.nbytes
        return weight

    def vocabulary(self, name: str, vocab_size: int, hidden_size: int) -> Tensor:
        """Load this rank's rows of `name`.weight [vocab_size, hidden_size], zero-padded. Not counted in `num_bytes`."""
        shard = self.group.shard_vocab(vocab_size)
        return self.checkpoint.load(TensorSlice(f"{name}.weight", (vocab_size, hidden_size), 0, shard))
