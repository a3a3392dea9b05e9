"""CrossAttention: attention of one decoder layer to the rows of an encoder, whose keys and values are written once.

These keys and values are in the KV cache, in blocks of their own. Heads are divided among the ranks as in Attention.
"""

from __future__ import annotations

from torch import Tensor

from ...ipc.spec.models.model_config import ModelConfig
from ...kernels.contract import AttentionSpec, CrossStep, CrossWeights, PackedLinear
from ..step.model_step import StepContext
from ..weights.loader import LayerLoader, Projection
from .attention import NO_ROTATION, elements_of


class CrossAttention:
    """Cross-attention block, x [T, hidden_size] → [T, hidden_size]."""

    def __init__(self, loader: LayerLoader, prefix: str, config: ModelConfig, layer: int) -> None:
        """`prefix`: the prefix of the layer's tensor names, with the dot. `layer`: index in the model and KV cache."""
        self._ops, self._group, self._layer = loader.ops, loader.group, layer
        names, self._head_dim = config.names, config.head_dim
        heads = loader.group.shard(config.num_heads, "attention heads")
        kv_heads = loader.group.shard_kv_heads(config.num_kv_heads)

        def projection(name: str, num_heads: int, shard: range, *, has_bias: bool = True) -> Projection:
            size, rows = num_heads * self._head_dim, elements_of(shard, self._head_dim)
            return Projection(f"{prefix}{name}", size, [rows], has_bias)

        query = projection(names.cross_query, config.num_heads, heads)
        key = projection(names.cross_key, config.num_kv_heads, kv_heads, has_bias=config.has_key_bias)
        value = projection(names.cross_value, config.num_kv_heads, kv_heads)
        hidden_size, has_bias = config.hidden_size, config.has_qkv_bias
        self._query = loader.column_parallel(hidden_size, [query], has_bias)
        self._key_value = loader.column_parallel(hidden_size, [key, value], has_bias)
        shape, shard = (hidden_size, query.num_outputs), elements_of(heads, self._head_dim)
        self._output = loader.row_parallel(f"{prefix}{names.cross_output}", shape, shard, config.has_output_bias)
        self._norm = loader.norm(f"{prefix}{names.cross_norm}", hidden_size, config.norm)
        self.weights = CrossWeights(self._norm, self._query, AttentionSpec(config.attention_scale), self._output)

    def write(self, rows: Tensor, cross: CrossStep, kv_cache: Tensor) -> None:
        """Write the keys and values of encoder rows [m, hidden_size] to the slots of `cross` in the KV cache."""
        heads = self._heads(rows, self._key_value)
        self._ops.qk_norm_rope_cache(heads, None, NO_ROTATION, kv_cache, self._layer, cross.metadata)

    def __call__(self, x: Tensor, cross: CrossStep, context: StepContext) -> Tensor:
        query = self._heads(x, self._query)
        spec = self.weights.attention
        attended = self._ops.paged_attention(query, context.groups[0].kv_cache, self._layer, cross.metadata, spec)
        return self._group.all_reduce(self._ops.linear(attended.flatten(1), self._output))

    def _heads(self, x: Tensor, packed: PackedLinear) -> Tensor:
        num_heads = packed.out_features // self._head_dim
        return self._ops.linear(x, packed).view(len(x), num_heads, self._head_dim)
