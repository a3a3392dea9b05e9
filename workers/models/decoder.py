"""DecoderModel: the decoder of Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE, driven by ModelConfig.

    token ids → embedding → [norm → attention → norm → MLP] × num_layers → norm → (lm head) → logits

Knows the order of the layers and the names in a checkpoint; knows nothing of kernels, of how ranks talk, of requests.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...ipc.model_config import ModelConfig
from ...kernels.ops import AttentionMetadata, DecoderWeights, FusedDecoder, LayerWeights, Ops, PackedLinear
from ..layers.attention import Attention, AttentionShape
from ..layers.embedding import LMHead, VocabParallelEmbedding, load_vocab_shard
from ..layers.experts import SparseMLP
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding
from ..parallel import ParallelGroup
from ..weights import Checkpoint


class DecoderLayer:
    """One block. The residual stream is carried beside the hidden states and added inside the norms."""

    def __init__(
        self, input_norm: RMSNorm, attention: Attention, post_norm: RMSNorm, mlp: GatedMLP | SparseMLP
    ) -> None:
        self._input_norm = input_norm
        self.attention = attention
        self._post_norm = post_norm
        self._mlp = mlp

    @property
    def weights(self) -> LayerWeights | None:
        """None for a layer with experts."""
        if isinstance(self._mlp, SparseMLP):
            return None
        query_norm, key_norm = self.attention.norms or (None, None)
        return LayerWeights(
            input_norm=self._input_norm.weight,
            qkv=self.attention.qkv.packed,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            output=self.attention.output.packed,
            post_norm=self._post_norm.weight,
            gate_up=self._mlp.gate_up.packed,
            down=self._mlp.down.packed,
            sliding_window=self.attention.sliding_window,
        )

    @property
    def nbytes(self) -> int:
        return self._input_norm.nbytes + self.attention.nbytes + self._post_norm.nbytes + self._mlp.nbytes

    def __call__(
        self, hidden: Tensor | None, residual: Tensor, metadata: AttentionMetadata, kv_cache: Tensor
    ) -> Tensor:
        """hidden [T, hidden_size] is what the block before gives to `residual` (in place); None before the first."""
        normed = self._input_norm(residual) if hidden is None else self._input_norm.add(hidden, residual)
        attended = self.attention(normed, metadata, kv_cache)
        return self._mlp(self._post_norm.add(attended, residual))


class DecoderModel:
    """The weights of one rank. Inference only: call it under `torch.inference_mode()`."""

    def __init__(
        self,
        embedding: VocabParallelEmbedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        lm_head: LMHead,
        num_kv_heads_local: int,
        head_dim: int,
        weight_bytes: int,
        fused: FusedDecoder | None = None,
    ) -> None:
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._lm_head = lm_head
        self.num_kv_heads_local = num_kv_heads_local  # of this rank: what its KV cache holds
        self.head_dim = head_dim
        self.num_layers = len(layers)
        self.weight_bytes = weight_bytes  # of this rank
        self._fused = fused  # the same from embedding to norm, as one operation

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        """One step: token_ids [T] int → hidden states [T, hidden] after the final norm. Writes the step's K/V.

        kv_cache: [num_blocks, num_layers, 2, num_kv_heads_local, block_size, head_dim], the model's dtype, zeroed when
        it was made. T may be 0.
        """
        if self._fused is not None:
            return self._fused(token_ids, metadata, kv_cache)
        residual = self._embedding(token_ids)
        hidden: Tensor | None = None
        for layer in self._layers:
            hidden = layer(hidden, residual, metadata, kv_cache)
        assert hidden is not None
        return self._norm.add(hidden, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] → [n, vocab_size] float32 on rank 0; the others must call too and get [0, vocab_size]."""
        return self._lm_head(hidden)


def load_model(
    folder: Path,
    config: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    group: ParallelGroup,
) -> DecoderModel:
    """Read this rank's shard of the checkpoint in `folder` onto `device` as `dtype`.

    ConfigError if the checkpoint lacks a tensor, has one of another shape, is damaged, or does not divide by the group.
    """
    num_kv_heads_local = len(group.share_kv_heads(config.num_kv_heads))
    rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings, max_model_len, device)
    table: Tensor | PackedLinear
    with Checkpoint(folder, dtype, device, config.quantization) as checkpoint:
        table = load_vocab_shard(checkpoint, group, "model.embed_tokens", config.vocab_size, config.hidden_size)
        layers = [_load_layer(checkpoint, config, layer, ops, group, rotary) for layer in range(config.num_layers)]
        norm = RMSNorm.load(checkpoint, ops, "model.norm", config.hidden_size, config.rms_norm_eps)
        if config.tie_word_embeddings:
            head = table = ops.pack_linear(table, None)
        else:
            head = ops.pack_linear(
                load_vocab_shard(checkpoint, group, "lm_head", config.vocab_size, config.hidden_size), None
            )
    embedding, lm_head = VocabParallelEmbedding(ops, group, table), LMHead(ops, group, head, config.vocab_size)
    weight_bytes = embedding.nbytes + sum(layer.nbytes for layer in layers) + norm.nbytes + rotary.nbytes
    if not config.tie_word_embeddings:
        weight_bytes += lm_head.nbytes
    fused = None
    if group.size == 1:  # ranks must meet after each layer's halves
        fused = _fuse(ops, config, table, layers, norm, rotary)
    return DecoderModel(embedding, layers, norm, lm_head, num_kv_heads_local, config.head_dim, weight_bytes, fused)


def _fuse(
    ops: Ops,
    config: ModelConfig,
    table: Tensor | PackedLinear,
    layers: list[DecoderLayer],
    norm: RMSNorm,
    rotary: RotaryEmbedding,
) -> FusedDecoder | None:
    weights = [layer.weights for layer in layers]
    dense = [each for each in weights if each is not None]
    if len(dense) < len(layers):
        return None
    decoder = DecoderWeights(
        table=table,
        layers=dense,
        norm=norm.weight,
        eps=config.rms_norm_eps,
        cos_sin=rotary.cos_sin,
        scale=layers[0].attention.scale,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    return ops.fuse_decoder(decoder)


def _load_layer(
    checkpoint: Checkpoint, config: ModelConfig, layer: int, ops: Ops, group: ParallelGroup, rotary: RotaryEmbedding
) -> DecoderLayer:
    name = f"model.layers.{layer}"
    eps = config.rms_norm_eps
    shape = AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        has_qkv_bias=config.has_qkv_bias,
        has_output_bias=config.has_output_bias,
        sliding_window=config.sliding_windows[layer],
    )
    attention = Attention.load(
        checkpoint, ops, group, f"{name}.self_attn", shape, layer, rotary, eps if config.has_qk_norm else None
    )
    mlp: GatedMLP | SparseMLP
    if config.experts is not None and layer in config.experts.layers:
        mlp = SparseMLP.load(checkpoint, ops, group, name, config.hidden_size, config.experts)
    else:
        mlp = GatedMLP.load(
            checkpoint, ops, group, f"{name}.mlp", config.hidden_size, config.intermediate_size, config.has_mlp_bias
        )
    return DecoderLayer(
        RMSNorm.load(checkpoint, ops, f"{name}.input_layernorm", config.hidden_size, eps),
        attention,
        RMSNorm.load(checkpoint, ops, f"{name}.post_attention_layernorm", config.hidden_size, eps),
        mlp,
    )
