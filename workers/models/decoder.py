"""DecoderModel: the decoder of Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE, driven by ModelConfig.

    token ids → embedding → [norm → attention → norm → MLP] × num_layers → norm → (lm head) → logits

Knows the order of the layers and the names in a checkpoint; knows no kernels and no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ...ipc.config.model_config import ModelConfig
from ...kernels.contract import BatchColumns, DecoderWeights, FusedDecoder, LayerWeights, PackedLinear
from ...kernels.select import Ops
from ..kv_cache import KVCacheSpec
from ..layers.attention import Attention
from ..layers.mlp import GatedMLP
from ..layers.moe import SparseMLP
from ..layers.rotary import RotaryEmbedding
from ..model_step import StepContext
from ..parallel import ParallelGroup
from ..weights.checkpoint import Checkpoint
from ..weights.dummy import DummyCheckpoint
from ..weights.loader import LayerLoader


class DecoderLayer:
    """One block. The residual stream travels beside the hidden states and is added inside the norms."""

    def __init__(self, loader: LayerLoader, config: ModelConfig, layer: int, rotary: RotaryEmbedding) -> None:
        name, hidden_size = f"model.layers.{layer}", config.hidden_size
        self._ops = loader.ops
        self._eps = config.rms_norm_eps
        self._attention = Attention(loader, f"{name}.self_attn", config, layer, rotary)
        self._mlp: GatedMLP | SparseMLP
        if config.experts is not None and layer in config.experts.layers:
            self._mlp = SparseMLP(loader, name, hidden_size, config.experts)
        else:
            self._mlp = GatedMLP(loader, f"{name}.mlp", hidden_size, config.intermediate_size, config.has_mlp_bias)
        self._input_norm = loader.vector(f"{name}.input_layernorm", hidden_size)
        self._post_norm = loader.vector(f"{name}.post_attention_layernorm", hidden_size)

    @property
    def weights(self) -> LayerWeights | None:
        """The layer's weights for a fused decoder; None for a layer with experts."""
        if isinstance(self._mlp, SparseMLP):
            return None
        query_norm, key_norm = self._attention.norms or (None, None)
        return LayerWeights(
            input_norm=self._input_norm,
            qkv=self._attention.qkv,
            query_norm=query_norm,
            key_norm=key_norm,
            output=self._attention.output,
            post_norm=self._post_norm,
            gate_up=self._mlp.gate_up,
            down=self._mlp.down,
            sliding_window=self._attention.window,
        )

    def __call__(self, hidden: Tensor | None, residual: Tensor, context: StepContext) -> Tensor:
        """Run the block and return its MLP's output [T, hidden_size], which the next block adds to `residual`. hidden:
        the previous block's output, added to `residual` in place; None before the first block."""
        if hidden is None:
            normed = self._ops.rms_norm(residual, self._input_norm, self._eps)
        else:
            normed = self._ops.add_rms_norm(hidden, residual, self._input_norm, self._eps)
        # `normed` is reused, so that attention's input and output are freed before the wider MLP runs.
        normed = self._ops.add_rms_norm(self._attention(normed, context), residual, self._post_norm, self._eps)
        return self._mlp(normed)


class DecoderModel:
    """Weights and forward pass of one rank. Inference only: call it under `torch.inference_mode()`."""

    def __init__(self, loader: LayerLoader, config: ModelConfig, rotary: RotaryEmbedding) -> None:
        self._ops, self._group = loader.ops, loader.group
        self._eps, self._vocab_size = config.rms_norm_eps, config.vocab_size
        self._kv_shape = (config.num_layers, len(loader.group.shard_kv_heads(config.num_kv_heads)), config.head_dim)
        vocabulary = (config.vocab_size, config.hidden_size)
        table = loader.vocabulary("model.embed_tokens", *vocabulary)
        self._first_id = self._group.rank * len(table)
        self._layers = [DecoderLayer(loader, config, layer, rotary) for layer in range(config.num_layers)]
        self._norm = loader.vector("model.norm", config.hidden_size)
        self._table: Tensor | PackedLinear = table  # the embedding; packed if it is the weight of the head, too
        if config.tie_word_embeddings:
            self._head = self._table = loader.pack(table)
        else:
            self._head = loader.pack(loader.vocabulary("lm_head", *vocabulary))
            loader.num_bytes += table.nbytes
        self.weight_bytes = loader.num_bytes + rotary.cos_sin.nbytes  # of this rank
        self._fused = self._fuse(config, rotary)

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        """Return one spec: all layers share their block tables."""
        return [KVCacheSpec(*self._kv_shape, block_size, dtype)]

    def _fuse(self, config: ModelConfig, rotary: RotaryEmbedding) -> FusedDecoder | None:
        """Return the forward pass as one operation; None for several ranks, for experts or without such kernels."""
        weights = [layer.weights for layer in self._layers]
        dense = [each for each in weights if each is not None]
        if self._group.size > 1 or len(dense) < len(weights):  # a group must all-reduce in each layer
            return None
        decoder = DecoderWeights(
            table=self._table,
            layers=dense,
            norm=self._norm,
            head=self._head,
            eps=config.rms_norm_eps,
            cos_sin=rotary.cos_sin,
            scale=config.head_dim**-0.5,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        return self._ops.fuse_decoder(decoder)

    def forward_logits(self, token_ids: Tensor, logits_indices: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        """Compute one step and write its keys and values: token_ids [T] int → hidden states [T, hidden] after the final
        norm, and `compute_logits` of the tokens `logits_indices` [c] int64. Both tensors are valid until the next call.

        T may be 0. The KV cache must be zeroed before its first step.
        """
        if self._fused is not None:
            return self._fused(token_ids, logits_indices, context.metadata, context.kv_cache)
        hidden = self._run_layers(self._ops.embedding(token_ids, self._table, self._first_id), context)
        if not len(logits_indices):
            return hidden, torch.empty((0, self._vocab_size), device=hidden.device)
        return hidden, self.compute_logits(hidden[logits_indices])

    def forward_mixed(self, token_ids: Tensor, rows: BatchColumns, context: StepContext) -> Tensor:
        """Compute a step; return hidden states as `forward_logits`. Token id −1 − r: row r's last token, in `rows`."""
        return self._run_layers(self._ops.begin_step(token_ids, rows, self._table, self._first_id), context)

    def forward_decode(self, row_ids: Tensor, rows: BatchColumns, context: StepContext) -> Tensor:
        """Compute the last token of each row and return its hidden states [n, hidden]. row_ids: [n], −1 = padding.
        Ops.begin_decode fills in the metadata."""
        block_size = context.kv_cache.shape[4]
        embedded = self._ops.begin_decode(row_ids, rows, context.metadata, block_size, self._table, self._first_id)
        return self._run_layers(embedded, context)

    def _run_layers(self, embedded: Tensor, context: StepContext) -> Tensor:
        residual = self._group.all_reduce(embedded)
        hidden: Tensor | None = None
        for layer in self._layers:
            hidden = layer(hidden, residual, context)
        assert hidden is not None
        return self._ops.add_rms_norm(hidden, residual, self._norm, self._eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size] float32 of hidden [n, hidden_size] on rank 0. Other ranks must call, too; they
        get [0, vocab_size]."""
        shard = self._ops.logits(hidden, self._head)
        scores = self._group.gather(shard)
        if scores is None:
            return shard.new_empty((0, self._vocab_size))
        return scores[:, : self._vocab_size]


def load_model(
    folder: Path,
    config: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    group: ParallelGroup,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    is_dummy: bool = False,
) -> DecoderModel:
    """Make the model of `config` from this rank's shard of the checkpoint in `folder`, on `device` as `dtype`.

    `on_progress` is called with each tensor read: how many so far, and of how many. ConfigError if the checkpoint
    lacks a tensor, has one of another shape, is damaged, or does not divide by the group. `is_dummy`: random weights,
    and nothing is read.
    """
    rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings, max_model_len, device)
    arguments = (folder, dtype, device, config.quantization)
    with DummyCheckpoint(*arguments, {}) if is_dummy else Checkpoint(*arguments) as checkpoint:
        checkpoint.on_progress = on_progress
        return DecoderModel(LayerLoader(checkpoint, ops, group), config, rotary)
