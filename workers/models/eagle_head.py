"""EagleHead: an EAGLE-3 head (arXiv 2503.01840), which guesses tokens from hidden states of the engine's model.

    states behind some layers → fc → state ┐
                  embedding of the next token ┴→ norms → attention → norm → MLP → state → norm → lm_head → its tokens

The state is the residual stream of the head's layer. That behind the layer stands in for the model's states of the next
token while the model has not computed it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.spec.drafts.head_config import HeadConfig
from ...ipc.spec.models.model_config import ModelConfig
from ...kernels.contract import PackedLinear
from ...kernels.select import Ops
from ..layers.attention import Attention
from ..layers.mlp import MLP
from ..layers.rotary import make_rotary
from ..machine.parallel import ParallelGroup
from ..step.kv_cache import CachePlace, KVCacheSpec
from ..step.model_step import StepContext
from ..weights.checkpoint import TensorSlice
from ..weights.loader import LayerLoader
from ..weights.opening import open_checkpoint
from ..weights.quantized_weights import is_spare
from .decoder import DecoderModel

IGNORED = ["t2d"]  # which of the model's tokens the head can guess: d2t says it, too


class EagleHead:
    """Weights and forward pass of one rank. For inference only, as DecoderModel."""

    def __init__(
        self, loader: LayerLoader, config: ModelConfig, head: HeadConfig, target: DecoderModel, max_model_len: int
    ) -> None:
        """config: of the head's layer. target: the engine's model, which has the embedding and the lm_head if the head
        has none."""
        self._ops, self._group, self._target, names = loader.ops, loader.group, target, head.names
        self._is_residual_normed, self._vocab_size = head.is_residual_normed, config.vocab_size
        size = config.hidden_size
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
        self._first_id = self._group.shard_vocab(config.vocab_size).start
        self._table = loader.embedding(names.embedding, config.vocab_size, size) if names.embedding else None
        self._head_size, self._head = head.vocab_size, self._load_head(loader, head, size)
        self._token_ids = self._load_token_map(loader, head)
        tables = [each.cos_sin for each in rotaries if each.cos_sin is not None]
        self.weight_bytes = loader.num_bytes + sum(each.nbytes for each in tables)

    def _load_head(self, loader: LayerLoader, head: HeadConfig, size: int) -> PackedLinear | None:
        return loader.pack_head(head.names.head, head.vocab_size, size, None) if head.names.head else None

    def _load_token_map(self, loader: LayerLoader, head: HeadConfig) -> Tensor | None:
        """Return the model's ids [draft tokens] of the tokens that the head can guess; None: all, in order."""
        if not head.names.token_map:
            return None
        wanted = TensorSlice(head.names.token_map, (head.vocab_size,))
        offsets = loader.checkpoint.load_stored(wanted, ("I64", "I32")).long()
        token_ids = offsets + torch.arange(head.vocab_size, device=offsets.device)
        is_known = (token_ids >= 0) & (token_ids < self._vocab_size)
        if not bool(is_known.all()):
            raise ConfigError(
                f"{loader.checkpoint.source}: {head.names.token_map} names token {int(token_ids[~is_known][0])}, the "
                f"model has {self._vocab_size} tokens: choose a head of this model"
            )
        return token_ids

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
        embedded = self._ops.norm(self._embed(token_ids), self._embedding_norm)
        attended = self._attention(torch.cat((embedded, normed), dim=1), context)
        output = self._mlp(self._ops.add_norm(attended, residual, self._mlp_norm))
        normed = self._ops.add_norm(output, residual, self._norm)
        return residual, self._logits(normed[logits_indices])

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._table is None:
            return self._target.embed(token_ids)
        return self._group.all_reduce(self._ops.embedding(token_ids, self._table, self._first_id))

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            return self._target.compute_logits(hidden)
        shard = self._ops.logits(hidden, self._head)
        scores = self._group.gather(shard)
        if scores is None:
            return shard.new_empty((0, self._vocab_size))
        scores = scores[:, : self._head_size]
        if self._token_ids is None:
            return scores
        return scores.new_full((len(scores), self._vocab_size), -torch.inf).index_copy_(1, self._token_ids, scores)


def load_head(
    folder: Path,
    config: ModelConfig,
    head: HeadConfig,
    target: DecoderModel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    group: ParallelGroup,
) -> EagleHead:
    """Load this rank's shard of the head in `folder`. ConfigError as for `load_model`."""
    with open_checkpoint(folder, dtype, device, config.quantization) as checkpoint:
        model = EagleHead(LayerLoader(checkpoint, ops, group), config, head, target, max_model_len)
        if group.rank == 0:
            checkpoint.refuse_unread(IGNORED, lambda name: is_spare(checkpoint, name))
        return model
