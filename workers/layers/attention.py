"""Attention of one decoder layer: project, normalize, rotate, store, attend, project back.

Query heads are divided among the ranks. Each rank holds the KV heads that its query heads read; several ranks may hold
the same KV head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ipc.spec.models.model_config import HeadNormsConfig, ModelConfig
from ...kernels.contract import NO_ACTIVATION, Activation, AttentionSpec, AttentionWeights, HeadNorms, Norm, Rotary
from ..step.kv_cache import CachePlace, layer_cache
from ..step.model_step import StepContext
from ..weights.loader import LayerLoader, Projection, stacked
from .elementwise import scaled

NO_ROTATION = Rotary(None)


class Attention:
    """Attention block, x [T, hidden_size] → [T, hidden_size]. It writes keys and values to one layer of the KV cache,
    or reads those of an earlier layer and has none of its own."""

    def __init__(
        self,
        loader: LayerLoader,
        prefix: str,
        config: ModelConfig,
        layer: int,
        rotaries: Sequence[Rotary],
        place: CachePlace,
        position_bias: Tensor | None = None,
        num_inputs: int | None = None,
    ) -> None:
        """`prefix`: the prefix of the layer's tensor names, with the dot. `layer`: the layer's index in the model.
        rotaries: one for each of `config.ropes`. `place`: of its keys and values. position_bias: AttentionSpec.bias of
        this rank's heads. num_inputs: elements of a token in x; None: hidden_size."""
        self._ops, self._group = loader.ops, loader.group
        own = config.layers[layer]
        self._has_own_shape = place.has_own_shape
        self._has_own_kv = own.kv_layer is None
        config = config.at_layer(layer)
        rope = config.layers[layer].rope
        names, head_dim = config.names, config.head_dim
        self._head_dim = head_dim
        heads = loader.group.shard(config.num_heads, "attention heads")
        kv_heads = loader.group.shard_kv_heads(config.num_kv_heads)
        self.cache_shape = (len(kv_heads), head_dim)
        self._num_local_heads = len(heads) + (2 * len(kv_heads) if self._has_own_kv else 0)  # query | key | value
        order = None
        if rope is not None and config.ropes[rope].is_paired:
            order = _halves_order(config.ropes[rope].rotary_dim or head_dim, head_dim)
        num_rotated = len(heads) + len(kv_heads)
        self._num_gates = len(heads) * head_dim if config.has_output_gate else 0  # outputs behind those of the heads
        projections = _projections(prefix, config, heads, kv_heads)
        row_order = None if order is None else _rows_of(order, num_rotated, len(kv_heads))
        if not self._has_own_kv:
            projections = projections[:1]
        elif own.are_values_keys:
            assert row_order is None
            projections, row_order = projections[:2], _keys_twice(len(heads) * head_dim, len(kv_heads) * head_dim)
        qkv = loader.column_parallel(
            num_inputs or config.hidden_size,
            projections,
            config.has_qkv_bias,
            Activation("clamp", limit=config.qkv_clip) if config.qkv_clip else NO_ACTIVATION,
            row_order,
            is_transposed=names.is_transposed,
        )
        output_shape, shard = (config.hidden_size, config.num_heads * head_dim), elements_of(heads, head_dim)
        output = loader.row_parallel(
            f"{prefix}{names.output}", output_shape, shard, config.has_output_bias, is_transposed=names.is_transposed
        )
        norms: HeadNorms | None = None
        if config.head_norms is not None:
            norms = _load_norms(
                loader, prefix, config, config.head_norms, heads, kv_heads, order, has_keys=self._has_own_kv
            )
        self._value_norm = None if config.value_norm is None else loader.norm("", head_dim, config.value_norm)
        sinks = None
        if config.has_sinks:
            sinks = loader.vector(f"{prefix}{names.sinks}", (config.num_heads,), 0, heads)
        window = config.layers[layer].window
        spec = AttentionSpec(config.attention_scale, window, config.attention_softcap, sinks, position_bias)
        rotary = NO_ROTATION if rope is None else rotaries[rope]
        self.weights = AttentionWeights(
            qkv,
            norms,
            rotary,
            spec,
            output,
            has_gates=config.has_output_gate,
            input_scale=config.attention_input_scale,
            output_scale=config.attention_output_scale,
            group=place.group,
            cache_layer=place.layer,
        )

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        weights, layer = self.weights, self.weights.cache_layer
        kv_cache, metadata = context.groups[weights.group]
        if self._has_own_shape:
            kv_cache, layer = layer_cache(kv_cache, layer, *self.cache_shape), 0
        x = scaled(x, weights.input_scale)
        projected, gates = self._ops.linear(x, weights.qkv), None
        if self._num_gates:
            projected, gates = projected[:, : -self._num_gates], projected[:, -self._num_gates :]
        # [T, query heads | key heads | value heads, head_dim]
        heads = projected.view(x.shape[0], self._num_local_heads, self._head_dim)
        norms = weights.head_norms
        if norms is not None and norms.spans_heads and self._group.size > 1:
            self._normalize_over_ranks(heads, norms)
            norms = None
        if self._value_norm is not None and self._has_own_kv:
            values = heads[:, -self.cache_shape[0] :]
            values.copy_(self._ops.norm(values, self._value_norm))
        if self._has_own_kv:
            rotary = weights.rotary
            if metadata.cos_sin is not None and rotary.cos_sin is not None:
                rotary = Rotary(metadata.cos_sin, rotary.query_scale)
            query = self._ops.qk_norm_rope_cache(heads, norms, rotary, kv_cache, layer, metadata)
        else:
            query = self._prepare_query(heads, metadata.positions)
        attended = self._ops.paged_attention(query, kv_cache, layer, metadata, weights.spec)
        attended = attended.flatten(1)
        if gates is not None:
            attended = attended * self._ops.sigmoid(gates)
        return scaled(self._group.all_reduce(self._ops.linear(attended, weights.output)), weights.output_scale)

    def _prepare_query(self, query: Tensor, positions: Tensor) -> Tensor:
        """Normalize and rotate query heads in place, for a layer that has no keys and values of its own; return
        them."""
        norms, cos_sin = self.weights.head_norms, self.weights.rotary.cos_sin
        if norms is not None:
            self._ops.norm_heads(query, norms.query, norms.spans_heads)
        if cos_sin is not None:
            self._ops.rotate(query, positions, cos_sin)
        return query

    def _normalize_over_ranks(self, heads: Tensor, norms: HeadNorms) -> None:
        """Apply RMS norms that span the heads of all ranks, in place."""
        num_keys = (self._num_local_heads - heads_of(norms.query)) // 2
        parts = torch.split(heads, [heads_of(norms.query), num_keys, num_keys], dim=1)[:2]
        squares = torch.stack([part.float().square().mean(dim=(1, 2)) for part in parts], dim=-1)
        means = self._group.all_reduce(squares) / self._group.size  # all ranks have the same number of heads
        for index, (part, norm) in enumerate(zip(parts, (norms.query, norms.key), strict=True)):
            assert norm.weight is not None
            part.copy_(part * torch.rsqrt(means[:, index, None, None] + norm.eps) * norm.weight)


def heads_of(norm: Norm) -> int:
    """Return the number of heads of a norm with a weight [heads, D]."""
    assert norm.weight is not None
    return norm.weight.shape[0]


def _projections(prefix: str, config: ModelConfig, heads: range, kv_heads: range) -> list[Projection]:
    """Return the projections that load this rank's query, key and value heads, in this order."""
    names, head_dim = config.names, config.head_dim
    sizes = [count * head_dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    shards = [elements_of(each, head_dim) for each in (heads, kv_heads, kv_heads)]
    if config.has_output_gate:
        return _gated_projections(prefix, config, heads, kv_heads)
    if not names.qkv:
        parts = ((names.query, True), (names.key, config.has_key_bias), (names.value, True))
        return [
            Projection(f"{prefix}{name}", size, [shard], has_bias)
            for (name, has_bias), size, shard in zip(parts, sizes, shards, strict=True)
        ]
    if names.qkv_layout == "stacked":
        return stacked(f"{prefix}{names.qkv}", sizes, shards)
    group = config.num_heads // config.num_kv_heads  # query heads per KV head; the KV head's key and value follow them
    queries = [head // group * (group + 2) + head % group for head in heads]
    keys = [head * (group + 2) + group for head in kv_heads]
    rows = [elements_of(range(head, head + 1), head_dim) for head in (*queries, *keys, *(key + 1 for key in keys))]
    return [Projection(f"{prefix}{names.qkv}", sum(sizes), rows)]


def _gated_projections(prefix: str, config: ModelConfig, heads: range, kv_heads: range) -> list[Projection]:
    """Return the projections for queries, keys, values and then the gates of the heads, each of which follows its query
    head in the checkpoint."""
    names, head_dim = config.names, config.head_dim
    doubled = [elements_of(range(head, head + 1), head_dim) for head in range(2 * config.num_heads)]
    queries, gates = (doubled[2 * heads.start + offset : 2 * heads.stop : 2] for offset in (0, 1))
    num_keys, shard = config.num_kv_heads * head_dim, elements_of(kv_heads, head_dim)
    num_queries = 2 * config.num_heads * head_dim
    return [
        Projection(f"{prefix}{names.query}", num_queries, queries),
        Projection(f"{prefix}{names.key}", num_keys, [shard], config.has_key_bias),
        Projection(f"{prefix}{names.value}", num_keys, [shard]),
        Projection(f"{prefix}{names.query}", num_queries, gates),
    ]


def _load_norms(
    loader: LayerLoader,
    prefix: str,
    config: ModelConfig,
    norms: HeadNormsConfig,
    heads: range,
    kv_heads: range,
    order: Tensor | None,
    *,
    has_keys: bool,
) -> HeadNorms:
    """Load the norms of query and key heads. order: [D], the order into which the elements of heads were put; None:
    unchanged. Without `has_keys` the key norm is a copy of the query norm that is not used."""
    size = config.head_dim

    def load(name: str, num_heads: int, shard: range) -> Norm:
        if norms.has_weight_per_head:
            if "{head}" in name:
                # Every rank reads the tensors of all heads: one that rank 0 has not read would be refused as surplus.
                rows = [loader.vector(f"{name.format(head=head)}.weight", (size,)) for head in range(num_heads)]
                weight = torch.stack(rows[shard.start : shard.stop]) + norms.norm.offset
            else:
                weight = loader.vector(f"{name}.weight", (num_heads, size), 0, shard) + norms.norm.offset
            norm = Norm(norms.norm.kind, weight, None, norms.norm.eps)
        elif norms.spans_heads:
            weight = loader.vector(f"{name}.weight", (num_heads * size,), 0, elements_of(shard, size))
            norm = Norm(norms.norm.kind, weight.view(-1, size) + norms.norm.offset, None, norms.norm.eps)
        else:
            norm = loader.norm(name, size, norms.norm)
        if order is None:
            return norm
        moved = [None if each is None else each[..., order] for each in (norm.weight, norm.bias)]
        return Norm(norm.kind, moved[0], moved[1], norm.eps)

    query = load(f"{prefix}{config.names.query_norm}", config.num_heads, heads)
    key = load(f"{prefix}{config.names.key_norm}", config.num_kv_heads, kv_heads) if has_keys else query
    return HeadNorms(query, key, norms.spans_heads, norms.is_after_rope)


def elements_of(heads: range, head_dim: int) -> range:
    """Return the indices of the outputs of a projection that belong to these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def _keys_twice(num_queries: int, num_keys: int) -> Tensor:
    """Return the order of rows that turns query | key into query | key | key."""
    rows = torch.arange(num_queries + num_keys)
    return torch.cat((rows, rows[num_queries:]))


def _halves_order(rotary_dim: int, head_dim: int) -> Tensor:
    """Return the order [head_dim] that turns rotated pairs (0, 1), (2, 3), … into pairs (i, i + rotary_dim / 2).
    Scores do not change, since queries and keys are reordered alike."""
    rotated = torch.arange(rotary_dim)
    return torch.cat((rotated[::2], rotated[1::2], torch.arange(rotary_dim, head_dim)))


def _rows_of(order: Tensor, num_rotated: int, num_values: int) -> Tensor:
    """Return the order of all rows of a fused projection: elements of rotated heads by `order`, value heads
    unchanged."""
    head_dim = len(order)
    rotated = torch.arange(num_rotated)[:, None] * head_dim + order
    values = torch.arange(num_rotated * head_dim, (num_rotated + num_values) * head_dim)
    return torch.cat((rotated.flatten(), values))
