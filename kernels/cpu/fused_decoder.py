"""CpuDecoder: a whole decoder step as one C call (step.c), for a single rank."""

from __future__ import annotations

from ctypes import Structure, addressof, byref

import torch
from torch import Tensor

from ..contract import AttentionMetadata, DecoderWeights, HeadNorms, LayerWeights, Norm, PackedLinear, Rotary
from . import library as c


class CpuDecoder:
    """Decoder in C, called once per step. Owns its structs, the weights, and buffers for the largest step so far."""

    def __init__(
        self, library: c.KernelLibrary, weights: DecoderWeights, dtype: torch.dtype, is_batch_invariant: bool
    ) -> None:
        self._library = library
        self._weights = weights
        self._dtype = dtype
        assert weights.norm.weight is not None
        self._hidden_size = weights.norm.weight.shape[0]
        self._layers = (c.Layer * len(weights.layers))(*map(_layer, weights.layers))
        self._decoder = self._describe(weights, is_batch_invariant)
        self._elements_per_token = library.decoder_scratch(byref(self._decoder), 1)
        self._scratch = torch.empty(0, dtype=dtype)
        self._hidden = torch.empty((0, self._hidden_size), dtype=dtype)
        self._logits = torch.empty((0, weights.head.out_features))
        self._outputs = self._hidden, self._logits  # views of the last call's shapes, which the next often repeats

    def __call__(
        self, token_ids: Tensor, logits_indices: Tensor, metadata: AttentionMetadata, kv_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_logits = token_ids.shape[0], logits_indices.shape[0]
        if token_ids.dtype != torch.int32:
            token_ids = token_ids.int()
        if self._outputs[0].shape[0] != num_tokens or self._outputs[1].shape[0] != num_logits:
            self._make_room(num_tokens, num_logits)
        step = c.Step(
            token_ids.data_ptr(),
            metadata.positions.data_ptr(),
            metadata.slots.data_ptr(),
            num_tokens,
            c.step_rows(metadata),
            kv_cache.data_ptr(),
            kv_cache.shape[4],
            self._hidden.data_ptr(),
            logits_indices.data_ptr(),
            num_logits,
            self._logits.data_ptr(),
        )
        result = self._library.decoder_step(
            byref(self._decoder), byref(step), self._scratch.data_ptr(), torch.get_num_threads()
        )
        if result != 0:
            raise MemoryError(f"no memory for the attention plan of {len(metadata.seq_lens_host)} rows")
        return self._outputs

    def _make_room(self, num_tokens: int, num_logits: int) -> None:
        if self._hidden.shape[0] < num_tokens:
            self._hidden = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype)
            self._scratch = torch.empty(num_tokens * self._elements_per_token, dtype=self._dtype)
        if self._logits.shape[0] < num_logits:
            self._logits = torch.empty((num_logits, self._logits.shape[1]))
        self._outputs = self._hidden[:num_tokens], self._logits[:num_logits]

    def _describe(self, weights: DecoderWeights, is_batch_invariant: bool) -> Structure:
        table = weights.table
        return c.Decoder(
            layers=addressof(self._layers),
            num_layers=len(weights.layers),
            hidden_size=self._hidden_size,
            num_heads=weights.num_heads,
            num_kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            eps=weights.norm.eps,
            scale=weights.layers[0].attention.scale,
            final_norm=_address(weights.norm),
            cos_sin=_cos_sin(weights),
            packed_table=None if isinstance(table, Tensor) else addressof(_linear(table)),
            table=table.data_ptr() if isinstance(table, Tensor) else None,
            num_ids=table.shape[0] if isinstance(table, Tensor) else table.out_features,
            head=addressof(_linear(weights.head)),
            is_batch_invariant=is_batch_invariant,
        )


def _linear(packed: PackedLinear) -> Structure:
    struct = getattr(packed, "struct", None)
    assert isinstance(struct, c.Linear), "packed by the same Ops"
    return struct


def _layer(weights: LayerWeights) -> Structure:
    query_norm, key_norm, _ = c.head_norms(weights.head_norms)
    return c.Layer(
        qkv=_linear(weights.qkv),
        output=_linear(weights.output),
        gate_up=_linear(weights.up),
        down=_linear(weights.down),
        input_norm=_address(weights.input_norm),
        post_norm=_address(weights.mlp_norm),
        query_norm=query_norm,
        key_norm=key_norm,
        window=weights.attention.window or 0,
    )


def _cos_sin(weights: DecoderWeights) -> int:
    cos_sin = weights.layers[0].rotary.cos_sin
    assert cos_sin is not None
    return cos_sin.data_ptr()


def _address(norm: Norm | None) -> int:
    assert norm is not None and norm.weight is not None
    return norm.weight.data_ptr()


def can_fuse(weights: DecoderWeights) -> bool:
    """Whether step.c computes this decoder; if not, its layers run one by one."""
    first, norms = weights.layers[0], [weights.norm]
    for layer in weights.layers:
        if layer.input_norm is None or layer.mlp_norm is None or layer.is_parallel:
            return False
        if layer.attention_output_norm is not None or layer.mlp_output_norm is not None:
            return False
        if not can_fuse_heads(layer.head_norms, layer.rotary, weights.head_dim):
            return False
        if layer.rotary is not first.rotary or layer.attention.scale != first.attention.scale:
            return False
        if layer.attention.softcap or layer.attention.sinks is not None or not _has_gated_silu(layer.up):
            return False
        norms += [layer.input_norm, layer.mlp_norm]
        norms += [] if layer.head_norms is None else [layer.head_norms.query]
    scales = (weights.embedding_scale, weights.residual_scale, weights.logit_scale)
    is_plain = weights.positions is None and not weights.logit_softcap and set(scales) == {1.0}
    is_rms = all(norm.kind == "rms" and norm.weight is not None for norm in norms)
    return is_plain and is_rms and len({norm.eps for norm in norms}) == 1


def can_fuse_heads(norms: HeadNorms | None, rotary: Rotary, head_dim: int) -> bool:
    """Whether heads.c computes these norms and this rotation: RMS norms of each head before a full rotation."""
    is_plain = rotary.query_scale is None and rotary.cos_sin is not None and rotary.cos_sin.shape[1] == head_dim
    if norms is None or not is_plain:
        return is_plain
    is_rms = all(norm.kind == "rms" and norm.weight is not None for norm in (norms.query, norms.key))
    is_shared = is_rms and norms.query.weight is not None and norms.query.weight.dim() == 1
    return is_shared and not norms.is_after_rope and norms.query.eps == norms.key.eps


def _has_gated_silu(packed: PackedLinear) -> bool:
    return bool(_linear(packed).is_gated)
