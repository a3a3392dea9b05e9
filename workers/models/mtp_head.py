"""MtpHead: a layer for multi-token prediction of the model's own checkpoint (arXiv 2412.19437, section 2.2).

    state behind the model's final norm ┐
            embedding of the next token ┴→ norms → projection → layer → norm → lm_head

For later drafts its own output stands in for the model's state: before or behind its norm, as the family was trained.
Knows no family: HeadConfig has the names and the order of the two inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.spec.drafts.head_config import HeadConfig
from ...ipc.spec.models.model_config import ModelConfig
from ..layers.rotary import make_rotary
from ..step.kv_cache import CachePlace, KVCacheSpec
from ..step.model_step import StepContext
from ..weights.loader import LayerLoader
from .decoder import DecoderModel
from .decoder_layer import DecoderLayer
from .head_vocabulary import HeadVocabulary


class MtpHead:
    """Weights and forward pass of one rank. For inference only, as DecoderModel."""

    def __init__(
        self, loader: LayerLoader, config: ModelConfig, head: HeadConfig, target: DecoderModel, max_model_len: int
    ) -> None:
        """config: its last layer is the head's. target: the engine's model, which has the embedding, and
        the lm_head if the head has none."""
        self._ops, names, size = loader.ops, head.names, config.hidden_size
        self._is_state_first, self._continues_normed = head.is_state_first, head.continues_normed
        self._embedding_norm = loader.norm(names.embedding_norm, size, config.norm)
        self._state_norm = loader.norm(names.state_norm, size, config.norm)
        self._projection = loader.replicated(names.projection, (size, 2 * size))
        rotaries = [make_rotary(config, rope, max_model_len, loader.checkpoint.device) for rope in config.ropes]
        self._layer = DecoderLayer(loader, config, config.num_layers - 1, rotaries, None, CachePlace(0, 0, False))
        self._norm = loader.norm(names.norm, size, config.norm)
        self._vocabulary = HeadVocabulary(loader, config, head, target)
        tables = [each.cos_sin for each in rotaries if each.cos_sin is not None]
        self.weight_bytes = loader.num_bytes + sum(each.nbytes for each in tables)

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        """Return the spec of the layer's keys and values, in a list."""
        return [KVCacheSpec(1, *self._layer.cache_shape, block_size, dtype)]

    def fuse(self, states: Tensor) -> Tensor:
        """Return the model's states, which the head reads as they are."""
        return states

    def forward_logits(self, token_ids: Tensor, logits_indices: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        """Compute a step as EagleHead does."""
        assert context.head_states is not None, "a head reads states"
        inputs = [
            self._ops.norm(self._vocabulary.embed(token_ids), self._embedding_norm),
            self._ops.norm(context.head_states, self._state_norm),
        ]
        if self._is_state_first:
            inputs.reverse()
        residual = self._ops.linear(torch.cat(inputs, dim=1), self._projection)
        hidden = self._layer(None, residual, context)
        assert hidden is not None, "the layer leaves its output to the norm"
        normed = self._ops.add_norm(hidden, residual, self._norm)
        logits = self._vocabulary.logits(normed[logits_indices])
        return (normed if self._continues_normed else residual), logits
