"""Attention of one decoder layer: project, normalize, rotate, store, attend, project back.

Heads are split between ranks; a rank holds the KV heads that its query heads read, which several ranks may hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.ops import AttentionMetadata, Ops
from ..parallel import ParallelGroup
from ..weights import Checkpoint
from .linear import ColumnParallelLinear, Projection, RowParallelLinear
from .norm import RMSNorm
from .rotary import RotaryEmbedding


@dataclass(frozen=True)
class AttentionShape:
    """The numbers of one layer's attention, over all ranks."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool
    has_output_bias: bool
    sliding_window: int | None


class Attention:
    """x [T, hidden_size] → [T, hidden_size]; keys and values go to layer `layer` of the KV cache."""

    def __init__(
        self,
        ops: Ops,
        shape: AttentionShape,
        layer: int,
        qkv: ColumnParallelLinear,
        norms: tuple[RMSNorm, RMSNorm] | None,
        rotary: RotaryEmbedding,
        output: RowParallelLinear,
        num_local_heads: tuple[int, int],
    ) -> None:
        self._ops = ops
        self._shape = shape
        self._layer = layer
        self._qkv = qkv
        self._norms = norms  # of query heads and of key heads
        self._rotary = rotary
        self._output = output
        self._num_heads, self._num_kv_heads = num_local_heads
        self._scale = shape.head_dim**-0.5

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        ops: Ops,
        group: ParallelGroup,
        name: str,
        shape: AttentionShape,
        layer: int,
        rotary: RotaryEmbedding,
        qk_norm_eps: float | None,
    ) -> Attention:
        """`qk_norm_eps` is None for models without norms of query and key heads."""
        head_dim = shape.head_dim
        heads = group.share(shape.num_heads, "attention heads")
        kv_heads = group.share_kv_heads(shape.num_kv_heads)
        projections = [
            Projection(f"{name}.q_proj", shape.num_heads * head_dim, _elements(heads, head_dim)),
            Projection(f"{name}.k_proj", shape.num_kv_heads * head_dim, _elements(kv_heads, head_dim)),
            Projection(f"{name}.v_proj", shape.num_kv_heads * head_dim, _elements(kv_heads, head_dim)),
        ]
        qkv = ColumnParallelLinear.load(checkpoint, ops, shape.hidden_size, projections, shape.has_qkv_bias)
        output = RowParallelLinear.load(
            checkpoint,
            ops,
            group,
            f"{name}.o_proj",
            (shape.hidden_size, shape.num_heads * head_dim),
            _elements(heads, head_dim),
            shape.has_output_bias,
        )
        norms = None
        if qk_norm_eps is not None:
            norms = (
                RMSNorm.load(checkpoint, ops, f"{name}.q_norm", head_dim, qk_norm_eps),
                RMSNorm.load(checkpoint, ops, f"{name}.k_norm", head_dim, qk_norm_eps),
            )
        return cls(ops, shape, layer, qkv, norms, rotary, output, (len(heads), len(kv_heads)))

    @property
    def nbytes(self) -> int:
        return self._qkv.nbytes + self._output.nbytes + sum(norm.nbytes for norm in self._norms or ())

    def __call__(self, x: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        num_rotated = self._num_heads + self._num_kv_heads
        # [T, query heads | key heads | value heads, head_dim]
        qkv = self._qkv(x).view(x.shape[0], num_rotated + self._num_kv_heads, self._shape.head_dim)
        query, key, value = torch.split(qkv, [self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1)
        if self._norms is not None:
            query.copy_(self._norms[0](query))
            key.copy_(self._norms[1](key))
        self._rotary(qkv[:, :num_rotated], metadata.positions)
        self._ops.store_kv(key, value, kv_cache, self._layer, metadata)
        attended = self._ops.paged_attention(
            query, kv_cache, self._layer, metadata, self._scale, self._shape.sliding_window
        )
        return self._output(attended.flatten(1))


def _elements(heads: range, head_dim: int) -> range:
    """The elements of a projection that belong to these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)
