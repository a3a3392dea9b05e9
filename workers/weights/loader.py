"""LayerLoader: loads this rank's shard of the parameters of layers, and packs it for the kernels.

A matrix in a checkpoint is [out, in]. A column-parallel layer shards its outputs and needs no communication; a
row-parallel layer shards its inputs, and the ranks' results are summed. Projections of the same input are packed into
one weight and one matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...ipc.spec.models.model_config import NormConfig
from ...kernels.contract import GATED_SILU, NO_ACTIVATION, Activation, Norm, PackedExperts, PackedLinear
from ...kernels.quantized import Weight, quantize
from ...kernels.select import Ops
from ..machine.parallel import ParallelGroup
from .adapted_layers import AdaptedLayers, column_parts, whole_part
from .checkpoint import Checkpoint, TensorSlice
from .quantized_weights import load_matrix


@dataclass(frozen=True)
class Projection:
    """A matrix [num_outputs, in] of a checkpoint, `name`.weight, of which this rank computes the outputs in `shards`,
    in this order. `has_bias`: False if it has no bias although other matrices of the layer have one."""

    name: str
    num_outputs: int
    shards: Sequence[range]
    has_bias: bool = True


def stacked(name: str, sizes: Sequence[int], shards: Sequence[range]) -> list[Projection]:
    """Return, in a list, the projection for a matrix that holds several projections one after the other. sizes: their
    numbers of outputs; shards: this rank's outputs of each."""
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    moved = [range(start + shard.start, start + shard.stop) for start, shard in zip(starts, shards, strict=True)]
    return [Projection(name, sum(sizes), moved)]


class LayerLoader:
    """Loader of layers from an open checkpoint. `num_bytes`: bytes of the parameters returned so far.
    `adapted`: is given the layers that adapters may update; None without adapters."""

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, group: ParallelGroup, adapted: AdaptedLayers | None = None
    ) -> None:
        self.checkpoint = checkpoint
        checkpoint.quantize = ops.quantize
        checkpoint.keeps_blocks = ops.packs_blocks
        self.ops = ops
        self.group = group
        self.adapted = adapted
        self.num_bytes = 0

    def column_parallel(
        self,
        num_inputs: int,
        projections: list[Projection],
        has_bias: bool,
        activation: Activation = NO_ACTIVATION,
        row_order: Tensor | None = None,
        *,
        is_transposed: bool = False,
    ) -> PackedLinear:
        """Load all `projections` as one layer: x [T, in] → [T, sum of their shards], in their order.

        With a gated activation the first half of the outputs gates the second. row_order: [out] int64, the index of the
        loaded output that becomes each output; None: the order is not changed. `is_transposed`: matrices are [in, out]
        in the checkpoint.
        """
        shares = [
            (TensorSlice(f"{p.name}.weight", (p.num_outputs, num_inputs), 0, None, is_transposed), p.shards)
            for p in projections
        ]
        wanted = (replace(whole, shard=shard) for whole, shards in shares for shard in shards)
        weight = load_matrix(self.checkpoint, *wanted)
        bias = None
        if has_bias:
            bias = torch.cat([self._bias(each) for each in projections])
        if row_order is not None:
            weight, bias = reordered(weight, row_order), None if bias is None else bias[row_order]
        packed = self.pack(weight, bias, activation)
        if self.adapted is not None:
            self.adapted.add(packed, weight.shape[0], list(column_parts(shares, row_order)))
        return packed

    def _bias(self, projection: Projection) -> Tensor:
        """Load this rank's biases of a projection; zeros if it has none."""
        name, size = projection.name, projection.num_outputs
        if projection.has_bias:
            slices = (TensorSlice(f"{name}.bias", (size,), 0, shard) for shard in projection.shards)
            return self.checkpoint.load(*slices)
        num_outputs = sum(map(len, projection.shards))
        return torch.zeros(num_outputs, dtype=self.checkpoint.dtype, device=self.checkpoint.device)

    def row_parallel(
        self, name: str, shape: tuple[int, int], shard: range, has_bias: bool, *, is_transposed: bool = False
    ) -> PackedLinear:
        """Load the layer x [T, `shard` of in] → [T, out], whose outputs must be summed over ranks; only rank 0 has the
        bias. `shape`: [out, in] of the whole matrix. `is_transposed`: the matrix is [in, out] in the checkpoint."""
        whole = TensorSlice(f"{name}.weight", shape, 1, None, is_transposed)
        weight = load_matrix(self.checkpoint, replace(whole, shard=shard))
        bias = None
        if has_bias and self.group.rank == 0:  # must be added to the sum only once
            bias = self.checkpoint.load(TensorSlice(f"{name}.bias", shape[:1]))
        packed = self.pack(weight, bias)
        if self.adapted is not None:
            self.adapted.add(packed, shape[0], [whole_part(whole, shard)])
        return packed

    def replicated(self, name: str, shape: tuple[int, int], *, has_bias: bool = False) -> PackedLinear:
        """Load a small layer that every rank has completely: x [T, in] → [T, out]. It is never quantized. shape: [out,
        in]."""
        whole = TensorSlice(f"{name}.weight", shape)
        bias = self.checkpoint.load(TensorSlice(f"{name}.bias", shape[:1])) if has_bias else None
        packed = self.pack(self.checkpoint.load(whole), bias)
        if self.adapted is not None:
            self.adapted.add(packed, shape[0], [whole_part(whole, is_exact=True)])
        return packed

    def pack(self, weight: Weight, bias: Tensor | None = None, activation: Activation = NO_ACTIVATION) -> PackedLinear:
        packed = self.ops.pack_linear(weight, bias, activation)
        self.num_bytes += packed.nbytes
        return packed

    def pack_head(self, name: str, vocab_size: int, hidden_size: int, bias: Tensor | None) -> PackedLinear:
        """Load and pack this rank's rows of the head's weight, `name`.weight [vocab_size, hidden_size]. If the kernels
        pack blocks, it keeps those of a GGUF file. With products as integers, another one is rounded to int8 with one
        scale for each row."""
        wanted = self._of_vocabulary(name, vocab_size, hidden_size)
        rows = self.checkpoint.load_rows(wanted) if self.ops.packs_blocks else None
        if rows is not None:
            return self.pack(rows, bias)
        weight = self.checkpoint.load(wanted)
        return self.pack(quantize(weight, "int8") if self.ops.has_integer_products else weight, bias)

    def pack_experts(
        self,
        gate_up: list[Weight],
        down: list[Weight],
        biases: tuple[Tensor, Tensor] | None = None,
        activation: Activation = GATED_SILU,
    ) -> PackedExperts:
        packed = self.ops.pack_experts(gate_up, down, biases, activation)
        self.num_bytes += packed.nbytes
        return packed

    def norm(self, name: str, size: int, config: NormConfig) -> Norm:
        """Load the norm `name` over `size` elements, unsharded."""
        weight = self.vector(f"{name}.weight", (size,)) if config.has_weight else None
        if weight is not None and config.offset:
            weight += config.offset
        bias = self.vector(f"{name}.bias", (size,)) if config.has_bias else None
        return Norm(config.kind, weight, bias, config.eps)

    def vector(self, name: str, shape: tuple[int, ...], axis: int = 0, shard: range | None = None) -> Tensor:
        """Load a small parameter in float32: the whole one, or a shard along `axis`."""
        values = self.checkpoint.load(TensorSlice(name, shape, axis, shard), dtype=torch.float32)
        self.num_bytes += values.nbytes
        return values

    def table(self, name: str, num_rows: int, hidden_size: int) -> Tensor | None:
        """Load a small table of embeddings, which every rank has; None if it has no rows."""
        if not num_rows:
            return None
        rows = self.checkpoint.load(TensorSlice(f"{name}.weight", (num_rows, hidden_size)))
        self.num_bytes += rows.nbytes
        return rows

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Tensor | PackedLinear:
        """Load this rank's rows of `name`.weight [vocab_size, hidden_size], padded with zeros. Rows of a GGUF file stay
        in their blocks if the kernels can look them up there."""
        wanted = self._of_vocabulary(name, vocab_size, hidden_size)
        rows = self.checkpoint.load_rows(wanted)
        table = self.checkpoint.load(wanted) if rows is None else self.ops.pack_table(rows)
        self.num_bytes += table.nbytes
        return table

    def _of_vocabulary(self, name: str, vocab_size: int, hidden_size: int) -> TensorSlice:
        return TensorSlice(f"{name}.weight", (vocab_size, hidden_size), 0, self.group.shard_vocab(vocab_size))


def reordered(weight: Weight, row_order: Tensor) -> Weight:
    """Return a weight [out, in] whose row i is row row_order[i] of `weight`. row_order: [out] int64."""
    if isinstance(weight, Tensor):
        return weight[row_order]
    return weight.select_outputs(row_order)
