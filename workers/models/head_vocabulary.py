"""HeadVocabulary: the embedding and the lm_head of a draft head, which may be those of the engine's model."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.spec.drafts.head_config import HeadConfig
from ...ipc.spec.models.model_config import ModelConfig
from ..weights.checkpoint import TensorSlice
from ..weights.loader import LayerLoader
from .decoder import DecoderModel


class HeadVocabulary:
    """Owner of the tables of one rank, as far as the head has its own, and of the tokens that it can guess."""

    def __init__(self, loader: LayerLoader, config: ModelConfig, head: HeadConfig, target: DecoderModel) -> None:
        """config: of the head's layer. target: the engine's model."""
        self._ops, self._group, self._target, names = loader.ops, loader.group, target, head.names
        self._vocab_size, self._num_guessed = config.vocab_size, head.vocab_size
        self._first_id = self._group.shard_vocab(config.vocab_size).start
        self._table = self._head = None
        if names.embedding:
            self._table = loader.embedding(names.embedding, config.vocab_size, config.hidden_size)
        if names.head:
            self._head = loader.pack_head(names.head, head.vocab_size, config.hidden_size, None)
        self._token_ids = self._load_token_map(loader, head)

    def _load_token_map(self, loader: LayerLoader, head: HeadConfig) -> Tensor | None:
        """Return the model's ids [guessed tokens] of the tokens that the head can guess; None: all, in order."""
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

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden_size] of tokens, as they are stored."""
        if self._table is None:
            self._target.forget_adapters()
            return self._target.embed(token_ids)
        return self._group.all_reduce(self._ops.embedding(token_ids, self._table, self._first_id))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [n, vocab_size] on rank 0, -inf for tokens that the head cannot guess; [0, vocab_size]
        on other ranks."""
        if self._head is None:
            self._target.forget_adapters()
            return self._target.compute_logits(hidden)
        shard = self._ops.logits(hidden, self._head)
        scores = self._group.gather(shard)
        if scores is None:
            return shard.new_empty((0, self._vocab_size))
        scores = scores[:, : self._num_guessed]
        if self._token_ids is None:
            return scores
        return scores.new_full((len(scores), self._vocab_size), -torch.inf).index_copy_(1, self._token_ids, scores)
