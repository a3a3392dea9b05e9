"""EagleHead: an EAGLE-3 head (arXiv 2503.01840), which guesses tokens from hidden states of the engine's model.

    states behind some layers → fc → state ┐
                  embedding of the next token ┴→ norms → attention → norm → MLP → state → norm → lm_head → its tokens

The state is the residual stream of the head's layer. That behind the layer stands in for the model's states of the next
token while the model has not computed it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.spec.drafts.head_config import HeadConfig
from ...ipc.spec.models.model_config import ModelConfig
from ..layers.attention import Attention
from ..layers.mlp import MLP
from ..layers.rotary import make_rotary
from ..step.kv_cache import CachePlace, KVCacheSpec
from ..step.model_step import StepContext
from ..weights.loader import LayerLoader
from .decoder import DecoderModel
from .head_vocabulary import HeadVocabulary


class EagleHead:
    """Weights and forward pass of one rank. For inference only, as DecoderModel."""

    def __init__(
        self, loader: LayerLoader, config: ModelConfig, head: HeadConfig, target: DecoderModel, max_model_len: int
    ) -> None:
        """config: of the head's layer. target: the engine's model, which has the embedding and the lm_head if the head
        has none."""
        self._ops, self._is_residual_normed = loader.ops, head.is_residual_normed
        names, size = head.names, config.hidden_size
        self._projection = loader.replicated(names.projection, (size, head.num_inputs))
        self._embedding_norm = loader.norm(names.embedding_norm, size, config.norm)
        self._state_norm = loader.norm(names.state_norm, size, config.norm)
        rotaries = [make_rotary(config, rope, max_model_len, loader.checkpoint.device) for rope in config.ropes]
        self._attention = Attention(
            loader, names.layer, config, 0, rotaries, CachePlace(0, 0, False), num_inputs=2 * size
        )
        self._mlp_norm = loader.norm(f"{names.layer}{config.names.mlp_norm}", size, config.norm)
        self._mlp = MLP(
            loader,
            names.layer,
            config.names,
            size,
            config.intermediate_size,
            config.activation,
            config.has_mlp_bias,
        )
        self._norm = loader.norm(names.norm, size, config.norm)
        self._vocabulary = HeadVocabulary(loader, config, head, target)
        tables = [each.cos_sin for each in rotaries if each.cos_sin is not None]
        self.weight_bytes = loader.num_bytes + sum(each.nbytes for each in tables)

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        """Return the spec of the layer's keys and values, in a list."""
        return [KVCacheSpec(1, *self._attention.cache_shape, block_size, dtype)]

    def fuse(self, states: Tensor) -> Tensor:
        """Return the state [T, hidden_size] of each token of which the model's states [T, num_inputs] are known."""
        return self._ops.linear(states, self._projection)

    def forward_logits(self, token_ids: Tensor, logits_indices: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        """Compute a step: for each of T positions the token behind it, and in `context.head_states` its state. Return
        the states [T, hidden_size] that follow, and float32 logits [c, vocab_size] of the tokens after those of
        `logits_indices`, on rank 0; -inf for tokens that the head cannot guess."""
        assert context.head_states is not None, "a head reads states"
        normed = self._ops.norm(context.head_states, self._state_norm)
        residual = (normed if self._is_residual_normed else context.head_states).clone()
        embedded = self._ops.norm(self._vocabulary.embed(token_ids), self._embedding_norm)
        attended = self._attention(torch.cat((embedded, normed), dim=1), context)
        output = self._mlp(self._ops.add_norm(attended, residual, self._mlp_norm))
        normed = self._ops.add_norm(output, residual, self._norm)
        return residual, self._vocabulary.logits(normed[logits_indices])
