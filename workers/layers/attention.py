"""Attention of one decoder layer: project, normalize, rotate, store, attend, project back.

Heads are split between ranks; a rank holds the KV heads that its query heads read, which several ranks may hold.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        self.qkv = qkv
        self.norms = norms  # of query heads and of key heads
        self._norm_eps = 0.0 if norms is None else norms[0].eps
        self._rotary = rotary
        self.output = output
        self.num_heads, self.num_kv_heads = num_local_heads
        self.scale = shape.head_dim**-0.5

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
    def sliding_window(self) -> int | None:
        return self._shape.sliding_window

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.output.nbytes + sum(norm.nbytes for norm in self.norms or ())

    def __call__(self, x: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        # [T, query heads | key heads | value heads, head_dim]
        heads = self.qkv(x).view(x.shape[0], self.num_heads + 2 * self.num_kv_heads, self._shape.head_dim)
        norms = None if self.norms is None else (self.norms[0].weight, self.norms[1].weight)
        query = self._ops.prepare_heads(
            heads, norms, self._norm_eps, self._rotary.cos_sin, kv_cache, self._layer, metadata
        )
        attended = self._ops.paged_attention(
            query, kv_cache, self._layer, metadata, self.scale, self._shape.sliding_window
        )
        return self.output(attended.flatten(1))


def _elements(heads: range, head_dim: int) -> range:
    """The elements of a projection that belong to these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)
