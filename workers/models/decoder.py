"""DecoderModel: the layers of all native families, driven by the fields of ModelConfig.

    token ids → embedding → [norm → attention → norm → MLP] × num_layers → norm → (lm head) → logits

Between attention and MLP, layers may have cross attention to the rows of an encoder. An encoder of text has the same
layers, whose tokens see all others, and no head.

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
    AuxStates,
    BatchColumns,
    CacheGroup,
    CrossStep,
    DecoderWeights,
    FusedDecoder,
    Norm,
    PackedLinear,
    Rotary,
)
from ..layers.rotary import rotations_at, section_axes
from ..step.kv_cache import KVCacheSpec, cache_places
from ..step.model_step import StepContext
from ..step.state_cache import StateSpec
from ..weights.checkpoint import TensorSlice
from ..weights.loader import LayerLoader
from .decoder_layer import DecoderLayer


class DecoderModel:
    """Weights and forward pass of one rank. For inference only: call it under `torch.inference_mode()`."""

    def __init__(
        self,
        loader: LayerLoader,
        config: ModelConfig,
        rotaries: Sequence[Rotary],
        groups: Sequence[KVGroup],
        position_bias: Tensor | None = None,
    ) -> None:
        """rotaries: one for each of `config.ropes`. groups: the layers' KV groups. position_bias: that of all layers,
        see AttentionSpec.bias."""
        self._ops, self._group = loader.ops, loader.group
        self._config, names = config, config.names
        self._vocab_size = config.vocab_size
        self._first_id = self._group.shard_vocab(config.vocab_size).start
        scale = torch.tensor(config.embedding_scale, dtype=loader.checkpoint.dtype)
        self._embedding_scale = scale.item()  # rounded to the dtype
        self._positions = loader.table(names.positions, config.num_learned_positions, config.hidden_size)
        if self._positions is not None:
            self._positions = self._positions[config.first_position :]
        self._token_types = loader.table(names.token_types, config.num_token_types, config.hidden_size)
        self._embedding_norm: Norm | None = None
        if config.embedding_norm is not None:
            self._embedding_norm = loader.norm(names.embedding_norm, config.hidden_size, config.embedding_norm)
        self._groups, places = groups, cache_places(config, groups)
        stateful = [layer for layer, own in enumerate(config.layers) if own.has_state]
        index_by_layer = {layer: index for index, layer in enumerate(stateful)}
        self._layers = [
            DecoderLayer(loader, config, layer, rotaries, position_bias, places.get(layer), index_by_layer.get(layer))
            for layer in range(config.num_layers)
        ]
        self.state_spec: StateSpec | None = None  # of the blocks of the group that keeps states
        shapes = [layer.state.shape for layer in self._layers if layer.state is not None]
        if shapes:
            self.state_spec = StateSpec(len(shapes), shapes[0], loader.checkpoint.dtype)
        self._cos_sin, self._axes = rotaries[0].cos_sin if rotaries else None, None
        if config.ropes and config.ropes[0].sections:
            axes = section_axes(config.ropes[0], config.ropes[0].rotary_dim or config.head_dim)
            self._axes = axes.to(loader.checkpoint.device)
        self._norm = loader.norm(names.norm, config.hidden_size, config.norm) if names.norm else None
        self._head = None if config.is_encoder else self._load_head(loader)
        self._table: Tensor | PackedLinear  # the embedding; the packed head if they are tied
        if self._head is not None and config.tie_word_embeddings:
            self._table = self._head
        else:
            self._table = loader.embedding(names.embedding, config.vocab_size, config.hidden_size)
        tables = [each.cos_sin for each in rotaries if each.cos_sin is not None]
        self.weight_bytes = loader.num_bytes + sum(each.nbytes for each in tables)  # on this rank
        self.adapted = loader.adapted
        if self.adapted is not None and self._head is not None:
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
        """Return the spec of each KV group that has keys and values. Its heads are those of the layer with the most
        elements."""
        specs = []
        for group in [each for each in self._groups if not each.is_state]:
            shapes = [self._layers[layer].cache_shape for layer in group.layers]
            widest = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))  # fp8 adds bytes to each head
            num_layers = 1 if self._config.is_encoder else len(group.layers)  # see cache_places
            specs.append(KVCacheSpec(num_layers, *widest, block_size, dtype))
        return specs

    def _load_head(self, loader: LayerLoader) -> PackedLinear:
        config, names = self._config, self._config.names
        bias = self._load_head_bias(loader) if config.has_head_bias else None
        name = names.embedding if config.tie_word_embeddings else names.head
        return loader.pack_head(name, config.vocab_size, config.hidden_size, bias)

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
            token_types=self._token_types,
            embedding_norm=self._embedding_norm,
            shares_cache=config.is_encoder,
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
            return self._fused(
                token_ids,
                logits_indices,
                context.groups,
                context.media,
                cross,
                context.states,
                context.token_types,
                context.aux,
            )
        hidden = self._run_layers(self._ops.embedding(token_ids, self._table, self._first_id), context)
        if not len(logits_indices):
            return hidden, torch.empty((0, self._vocab_size), device=hidden.device)
        return hidden, self.compute_logits(hidden, logits_indices)

    def forget_adapters(self) -> None:
        """Compute without adapters until the next step."""
        if self.adapted is not None:
            self.adapted.space.begin_step(None)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden_size] of tokens as they are stored."""
        return self._group.all_reduce(self._ops.embedding(token_ids, self._table, self._first_id))

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
        if self._token_types is not None:
            residual = residual + self._token_types[0 if context.token_types is None else context.token_types]
        if self._embedding_norm is not None:
            residual = self._ops.norm(residual, self._embedding_norm)
        hidden: Tensor | None = None
        for index, layer in enumerate(self._layers):
            keep_stream(context.aux, index, residual, hidden)
            hidden = layer(hidden, residual, context)
            if media is not None and index < len(media.added):
                if hidden is not None:
                    residual.add_(hidden)
                hidden = None
                residual.index_add_(0, media.tokens, media.added[index])
        keep_stream(context.aux, len(self._layers), residual, hidden)
        if self._norm is None:
            return residual if hidden is None else residual.add_(hidden)
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
        assert self._head is not None, "an encoder has no logits"
        shard = self._ops.logits(hidden, self._head)
        scores = self._group.gather(shard)
        if scores is None:
            return shard.new_empty((0, self._vocab_size))
        scores = scores[:, : self._vocab_size]
        if self._config.logit_scale != 1.0:
            scores = scores * self._config.logit_scale
        cap = self._config.logit_softcap
        return cap * torch.tanh(scores / cap) if cap else scores


def keep_stream(aux: AuxStates | None, depth: int, residual: Tensor, hidden: Tensor | None) -> None:
    """Copy the residual stream that has passed `depth` layers, if `aux` has a place for it. hidden: is not added to it
    yet; None: nothing."""
    if aux is not None and depth in aux.depths:
        place, size = list(aux.depths).index(depth), residual.shape[1]
        aux.out[:, place * size : (place + 1) * size] = residual if hidden is None else residual + hidden


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
