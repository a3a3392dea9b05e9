"""Attention of one decoder layer: project, normalize, rotate, store, attend, project back.

Query heads are split between ranks. Each rank holds the KV heads that its query heads read; several ranks may hold the
same one.
"""

from __future__ import annotations

from torch import Tensor

from ...ipc.config.model_config import ModelConfig
from ..model_step import StepContext
from ..weights.loader import LayerLoader, Projection
from .rotary import RotaryEmbedding


class Attention:
    """Block x [T, hidden_size] → [T, hidden_size]; writes keys and values to layer `layer` of the KV cache."""

    def __init__(
        self, loader: LayerLoader, name: str, config: ModelConfig, layer: int, rotary: RotaryEmbedding
    ) -> None:
        self._ops, self._group = loader.ops, loader.group
        self._layer = layer
        self._rotary = rotary
        self._eps = config.rms_norm_eps
        self.window = config.sliding_windows[layer]
        self.scale = config.head_dim**-0.5
        head_dim = self._head_dim = config.head_dim
        heads = loader.group.shard(config.num_heads, "attention heads")
        kv_heads = loader.group.shard_kv_heads(config.num_kv_heads)
        self._num_local_heads = len(heads) + 2 * len(kv_heads)  # of queries, of keys, of values
        projections = [
            Projection(f"{name}.q_proj", config.num_heads * head_dim, _elements(heads, head_dim)),
            Projection(f"{name}.k_proj", config.num_kv_heads * head_dim, _elements(kv_heads, head_dim)),
            Projection(f"{name}.v_proj", config.num_kv_heads * head_dim, _elements(kv_heads, head_dim)),
        ]
        self.qkv = loader.column_parallel(config.hidden_size, projections, config.has_qkv_bias)
        output_shape, shard = (config.hidden_size, config.num_heads * head_dim), _elements(heads, head_dim)
        self.output = loader.row_parallel(f"{name}.o_proj", output_shape, shard, config.has_output_bias)
        self.norms: tuple[Tensor, Tensor] | None = None  # weights [D], of query heads and of key heads
        if config.has_qk_norm:
            self.norms = loader.vector(f"{name}.q_norm", head_dim), loader.vector(f"{name}.k_norm", head_dim)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        metadata, kv_cache = context.metadata, context.kv_cache
        # [T, query heads | key heads | value heads, head_dim]
        heads = self._ops.linear(x, self.qkv).view(x.shape[0], self._num_local_heads, self._head_dim)
        query = self._ops.qk_norm_rope_cache(
            heads, self.norms, self._eps, self._rotary.cos_sin, kv_cache, self._layer, metadata
        )
        attended = self._ops.paged_attention(query, kv_cache, self._layer, metadata, self.scale, self.window)
        return self._group.all_reduce(self._ops.linear(attended.flatten(1), self.output))


def _elements(heads: range, head_dim: int) -> range:
    """Return the indices of the elements of a projection that belong to these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)
