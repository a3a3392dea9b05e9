"""DecoderModel: the decoder of all native families, driven by the fields of ModelConfig.

    token ids → embedding → [norm → attention → norm → MLP] × num_layers → norm → (lm head) → logits

Between attention and MLP, layers may have cross attention to the rows of an encoder.

Knows the order of the layers; knows no family, no kernels and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...ipc.spec.kv.kv_groups import KVGroup
from ...ipc.spec.models.model_config import CrossConfig, ModelConfig
from ...kernels.contract import (
    BatchColumns,
    CacheGroup,
    CrossStep,
    DecoderWeights,
    FusedDecoder,
    LayerWeights,
    Norm,
    PackedLinear,
    Rotary,
)
from ..layers.attention import Attention
from ..layers.cross_attention import CrossAttention
from ..layers.mlp import MLP
from ..layers.moe import MixedMLP, SparseMLP
from ..layers.rotary import rotations_at, section_axes
from ..step.kv_cache import CachePlace, KVCacheSpec, cache_places
from ..step.model_step import StepContext
from ..weights.checkpoint import TensorSlice
from ..weights.loader import LayerLoader


class DecoderLayer:
    """One layer. The residual stream is passed separately from the hidden states, which the norms add to it."""

    def __init__(
        self, loader: LayerLoader, config: ModelConfig, layer: int, rotaries: Sequence[Rotary], place: CachePlace
    ) -> None:
        names, prefix = config.names, f"{config.names.layers}.{layer}."
        self._ops = loader.ops
        self._scale, self._is_parallel = config.residual_scale, config.is_parallel
        self._attention = Attention(loader, prefix, config, layer, rotaries, place)
        self.cross = None if config.cross is None else CrossAttention(loader, prefix, config, layer)
        own, config = config.layers[layer], config.at_layer(layer)
        self._mlp: MLP | SparseMLP | MixedMLP
        if config.experts is None or not own.has_experts:
            self._mlp = MLP(
                loader,
                prefix,
                names,
                config.hidden_size,
                config.intermediate_size,
                config.activation,
                config.has_mlp_bias,
            )
        elif config.experts.is_beside_mlp:
            self._mlp = MixedMLP(loader, prefix, config, config.experts)
        else:
            self._mlp = SparseMLP(loader, prefix, names, config.hidden_size, config.experts)
        self._layer_scale: Tensor | None = None
        if config.has_layer_scale:
            self._layer_scale = loader.checkpoint.load(TensorSlice(f"{prefix}{names.layer_scale}", (1,)))
        self._is_fusible = self._layer_scale is None and config.value_norm is None and own.kv_layer is None

        def norm(name: str) -> Norm | None:
            return loader.norm(f"{prefix}{name}", config.hidden_size, config.norm) if name else None

        self._input_norm, self._attention_output_norm = norm(names.input_norm), norm(names.attention_output_norm)
        self._mlp_norm, self._mlp_output_norm = norm(names.mlp_norm), norm(names.mlp_output_norm)

    @property
    def weights(self) -> LayerWeights | None:
        """The layer's weights for a fused decoder; None if LayerWeights cannot describe the layer."""
        if isinstance(self._mlp, MixedMLP) or not self._is_fusible:
            return None
        return LayerWeights(
            input_norm=self._input_norm,
            qkv=self._attention.qkv,
            head_norms=self._attention.norms,
            rotary=self._attention.rotary,
            attention=self._attention.spec,
            output=self._attention.output,
            attention_output_norm=self._attention_output_norm,
            mlp_norm=self._mlp_norm,
            mlp=self._mlp.weights,
            mlp_output_norm=self._mlp_output_norm,
            is_parallel=self._is_parallel,
            cross=None if self.cross is None else self.cross.weights,
            group=self._attention.place.group,
            cache_layer=self._attention.place.layer,
        )

    @property
    def cache_shape(self) -> tuple[int, int]:
        """The number of this rank's KV heads, and head_dim."""
        return self._attention.cache_shape

    def __call__(self, hidden: Tensor | None, residual: Tensor, context: StepContext) -> Tensor | None:
        """Run the layer. Return the output [T, hidden_size] that the next layer must add to `residual`; None if it is
        added already. hidden: the previous layer's output, which is added to `residual` in place; None: nothing."""
        normed = self._normalize(hidden, residual, self._input_norm)
        # `normed` is reused, so that attention's input and output are freed before the wider MLP runs.
        if self._is_parallel:
            mlp_input = normed if self._mlp_norm is None else self._ops.norm(residual, self._mlp_norm)
            assert not isinstance(self._mlp, MixedMLP)
            return self._scaled(self._attention(normed, context) + self._mlp(mlp_input))
        attended = self._attention(normed, context)
        if self._attention_output_norm is not None:
            attended = self._ops.norm(attended, self._attention_output_norm)
        if self.cross is not None and context.cross is not None:
            normed = self._normalize(self._scaled(attended), residual, self.cross.weights.norm)
            attended = self.cross(normed, context.cross, context)
        normed = self._normalize(self._scaled(attended), residual, self._mlp_norm)
        output = self._mlp(normed, residual) if isinstance(self._mlp, MixedMLP) else self._mlp(normed)
        if self._mlp_output_norm is not None:
            output = self._ops.norm(output, self._mlp_output_norm)
        if self._layer_scale is None:
            return self._scaled(output)
        residual.add_(self._scaled(output)).mul_(self._layer_scale)
        return None

    def _normalize(self, hidden: Tensor | None, residual: Tensor, norm: Norm | None) -> Tensor:
        """Add `hidden`, if any, to `residual` in place; return the norm of `residual`, or a copy if `norm` is None."""
        if norm is None:
            return residual.add_(hidden).clone() if hidden is not None else residual.clone()
        if hidden is None:
            return self._ops.norm(residual, norm)
        return self._ops.add_norm(hidden, residual, norm)

    def _scaled(self, output: Tensor) -> Tensor:
        return output if self._scale == 1.0 else output * self._scale


class DecoderModel:
    """Weights and forward pass of one rank. For inference only: call it under `torch.inference_mode()`."""

    def __init__(
        self, loader: LayerLoader, config: ModelConfig, rotaries: Sequence[Rotary], groups: Sequence[KVGroup]
    ) -> None:
        """rotaries: one for each of `config.ropes`. groups: the layers' KV groups."""
        self._ops, self._group = loader.ops, loader.group
        self._config, names = config, config.names
        self._vocab_size = config.vocab_size
        self._first_id = self._group.shard_vocab(config.vocab_size).start
        scale = torch.tensor(config.embedding_scale, dtype=loader.checkpoint.dtype)
        self._embedding_scale = scale.item()  # rounded to the dtype
        self._positions: Tensor | None = None
        if config.num_learned_positions:
            shape = (config.num_learned_positions, config.hidden_size)
            self._positions = loader.checkpoint.load(TensorSlice(f"{names.positions}.weight", shape))
            loader.num_bytes += self._positions.nbytes
        self._groups = groups
        self._layers = [
            DecoderLayer(loader, config, layer, rotaries, place)
            for layer, place in enumerate(cache_places(config, groups))
        ]
        self._cos_sin, self._axes = rotaries[0].cos_sin if rotaries else None, None
        if config.ropes and config.ropes[0].sections:
            axes = section_axes(config.ropes[0], config.ropes[0].rotary_dim or config.head_dim)
            self._axes = axes.to(loader.checkpoint.device)
        self._norm = loader.norm(names.norm, config.hidden_size, config.norm)
        head_bias = self._load_head_bias(loader) if config.has_head_bias else None
        is_tied = config.tie_word_embeddings
        head = names.embedding if is_tied else names.head
        self._head = loader.pack_head(head, config.vocab_size, config.hidden_size, head_bias)
        self._table: Tensor | PackedLinear = self._head  # the embedding; the packed head if they are tied
        if not is_tied:
            self._table = loader.embedding(names.embedding, config.vocab_size, config.hidden_size)
        tables = [each.cos_sin for each in rotaries if each.cos_sin is not None]
        self.weight_bytes = loader.num_bytes + sum(each.nbytes for each in tables)  # on this rank
        self.adapted = loader.adapted
        if self.adapted is not None:
            shard = self._group.shard_vocab(config.vocab_size)
            self.adapted.add_vocabulary(self._table, self._head, config, shard)
        self._fused = self._fuse()

    @property
    def is_fused(self) -> bool:
        """Whether a step is one call of the kernels."""
        return self._fused is not None

    @property
    def state_bytes(self) -> int:
        return 0

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        """Return the spec of each KV group. Its heads are those of the layer with the most elements."""
        specs = []
        for group in self._groups:
            shapes = [self._layers[layer].cache_shape for layer in group.layers]
            widest = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))  # fp8 adds bytes to each head
            specs.append(KVCacheSpec(len(group.layers), *widest, block_size, dtype))
        return specs

    def _load_head_bias(self, loader: LayerLoader) -> Tensor:
        shard = self._group.shard_vocab(self._vocab_size)
        return loader.checkpoint.load(TensorSlice(f"{self._config.names.head}.bias", (self._vocab_size,), 0, shard))

    def _fuse(self) -> FusedDecoder | None:
        """Return the forward pass as one operation; None if there are several ranks, a layer cannot be fused, or there
        is no kernel."""
        config, weights = self._config, [layer.weights for layer in self._layers]
        fusible = [each for each in weights if each is not None]
        if self._group.size > 1 or len(fusible) < len(weights):  # several ranks must all-reduce in each layer
            return None
        decoder = DecoderWeights(
            table=self._table,
            positions=self._positions,
            embedding_scale=self._embedding_scale,
            layers=fusible,
            residual_scale=config.residual_scale,
            norm=self._norm,
            head=self._head,
            logit_scale=config.logit_scale,
            logit_softcap=config.logit_softcap,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        return self._ops.fuse_decoder(decoder)

    def forward_logits(self, token_ids: Tensor, logits_indices: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        """Compute a step of token_ids [T] int and write its keys and values. Return the hidden states [T, hidden] after
        the final norm, and the result of `compute_logits` for the tokens `logits_indices` [c] int64. Both tensors are
        valid until the next call.

        T may be 0. The KV cache must be zeroed before its first step.
        """
        self._begin_step(context)
        if self._fused is not None:
            cross = None if context.cross is None else context.cross.metadata
            return self._fused(token_ids, logits_indices, context.groups, context.media, cross)
        hidden = self._run_layers(self._ops.embedding(token_ids, self._table, self._first_id), context)
        if not len(logits_indices):
            return hidden, torch.empty((0, self._vocab_size), device=hidden.device)
        return hidden, self.compute_logits(hidden, logits_indices)

    def forward_mixed(self, token_ids: Tensor, rows: BatchColumns, context: StepContext) -> Tensor:
        """Compute a step and return its hidden states like `forward_logits`. A token id of −1 − r stands for the last
        token of row r in `rows`."""
        self._begin_step(context)
        if not len(token_ids):  # a step that only writes encoder rows
            return torch.empty((0, self._config.hidden_size), device=token_ids.device)
        return self._run_layers(self._ops.begin_step(token_ids, rows, self._table, self._first_id), context)

    def forward_decode(self, row_ids: Tensor, rows: BatchColumns, context: StepContext) -> Tensor:
        """Compute the last token of each row and return the hidden states [n, hidden]. row_ids: [n], −1 = padding. The
        metadata of `context` is filled in by Ops.begin_decode."""
        groups = [group.metadata for group in context.groups]
        embedded = self._ops.begin_decode(row_ids, rows, groups, context.block_size, self._table, self._first_id)
        if self._config.cross is not None:
            context = behind_clips(context, self._config.cross)
        return self._run_layers(embedded, context)

    def rotations_at(self, positions: Tensor) -> Tensor:
        """Return AttentionMetadata.cos_sin for tokens at `positions` [3, T] int64: their times, rows and columns. The
        model's rotary embedding must have sections for these."""
        assert self._axes is not None and self._cos_sin is not None
        return rotations_at(positions, self._axes, self._cos_sin)

    def _begin_step(self, context: StepContext) -> None:
        """Set the tokens' adapters, and write the keys and values of the step's encoder rows."""
        if self.adapted is not None:
            self.adapted.space.begin_step(context.token_slots)
        if context.cross is not None and context.cross.rows is not None:
            for layer in self._layers:
                assert layer.cross is not None
                layer.cross.write(context.cross.rows, context.cross, context.groups[0].kv_cache)

    def _run_layers(self, embedded: Tensor, context: StepContext) -> Tensor:
        residual = self._group.all_reduce(embedded)
        if self._embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        media = context.media
        if media is not None:
            residual.index_copy_(0, media.tokens, media.embeds)
        if self._positions is not None:
            residual = residual + self._positions[context.metadata.positions]
        hidden: Tensor | None = None
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, residual, context)
            if media is not None and index < len(media.added):
                if hidden is not None:
                    residual.add_(hidden)
                hidden = None
                residual.index_add_(0, media.tokens, media.added[index])
        if hidden is None:
            return self._ops.norm(residual, self._norm)
        return self._ops.add_norm(hidden, residual, self._norm)

    def compute_logits(self, hidden: Tensor, indices: Tensor | None = None) -> Tensor:
        """Return float32 logits [n, vocab_size] for the tokens `indices` [n] int64 of a step with the hidden states
        `hidden` [T, hidden_size]; None: for all tokens. All ranks must call; those other than rank 0 get [0,
        vocab_size].
        """
        if indices is not None:
            hidden = hidden[indices]
            if self.adapted is not None:
                self.adapted.space.choose_tokens(indices)
        shard = self._ops.logits(hidden, self._head)
        scores = self._group.gather(shard)
        if scores is None:
            return shard.new_empty((0, self._vocab_size))
        scores = scores[:, : self._vocab_size]
        if self._config.logit_scale != 1.0:
            scores = scores * self._config.logit_scale
        cap = self._config.logit_softcap
        return cap * torch.tanh(scores / cap) if cap else scores


def behind_clips(context: StepContext, cross: CrossConfig) -> StepContext:
    """Return the context of a decode step with cross attention, from a context in which each row's block table and
    length begin with those of its audio clip."""
    (kv_cache, whole), num_blocks = context.groups[0], cross.num_tokens // context.block_size
    assert cross.num_tokens == num_blocks * context.block_size
    lengths, tables = whole.seq_lens, whole.block_tables  # a length of 0 is padding
    own = replace(whole, seq_lens=(lengths - cross.num_tokens).clamp_(min=0), block_tables=tables[:, num_blocks:])
    of_clips = replace(
        whole,
        seq_lens=(lengths > 0).int() * cross.num_rows,
        block_tables=tables[:, :num_blocks],
        seq_lens_host=[cross.num_rows] * len(whole.seq_lens_host),
    )
    return replace(context, groups=[CacheGroup(kv_cache, own)], cross=CrossStep(of_clips))
