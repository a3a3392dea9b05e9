"""CpuDecoder: a whole decoder step as one C call (step.c), for a group of one rank."""

from __future__ import annotations

from ctypes import POINTER, byref, cast, pointer

import torch
from torch import Tensor

from ..ops import AttentionMetadata, DecoderWeights, LayerWeights, PackedLinear
from . import library as c


class CpuDecoder:
    """Owns the C description of the weights, keeps those alive, and scratch memory for the largest step so far."""

    def __init__(self, library: c.KernelLibrary, weights: DecoderWeights, dtype: torch.dtype) -> None:
        self._library = library
        self._weights = weights
        self._dtype = dtype
        self._hidden_size = weights.norm.shape[0]
        self._layers = (c.Layer * len(weights.layers))(*map(_layer, weights.layers))
        self._decoder = self._describe(weights)
        self._scratch = torch.empty(0, dtype=dtype)

    def __call__(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        num_tokens = token_ids.shape[0]
        out = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype)
        token_ids = token_ids.long()
        step = c.Step(
            token_ids.data_ptr(),
            metadata.positions.data_ptr(),
            metadata.slots.data_ptr(),
            num_tokens,
            c.step_rows(metadata),
            kv_cache.data_ptr(),
            kv_cache.shape[4],
        )
        num_elements = self._library.decoder_scratch(byref(self._decoder), num_tokens)
        residual_elements = num_tokens * self._hidden_size
        if self._scratch.numel() < num_elements + residual_elements:
            self._scratch = torch.empty(num_elements + residual_elements, dtype=self._dtype)
        result = self._library.decoder_step(
            byref(self._decoder),
            byref(step),
            self._scratch.data_ptr(),
            self._scratch.data_ptr() + num_elements * self._scratch.element_size(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if result != 0:
            raise MemoryError(f"no memory for the attention plan of {len(metadata.seq_lens_host)} rows")
        return out

    def _describe(self, weights: DecoderWeights) -> c.Decoder:
        table = weights.table
        return c.Decoder(
            layers=cast(self._layers, POINTER(c.Layer)),
            num_layers=len(weights.layers),
            hidden_size=self._hidden_size,
            num_heads=weights.num_heads,
            num_kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            eps=weights.eps,
            scale=weights.scale,
            final_norm=weights.norm.data_ptr(),
            cos_sin=weights.cos_sin.data_ptr(),
            packed_table=None if isinstance(table, Tensor) else pointer(_linear(table)),
            table=table.data_ptr() if isinstance(table, Tensor) else None,
            num_ids=table.shape[0] if isinstance(table, Tensor) else table.out_features,
        )


def _linear(packed: PackedLinear) -> c.Linear:
    struct = getattr(packed, "struct", None)
    assert isinstance(struct, c.Linear), "packed by the same Ops"
    return struct


def _layer(weights: LayerWeights) -> c.Layer:
    return c.Layer(
        qkv=_linear(weights.qkv),
        output=_linear(weights.output),
        gate_up=_linear(weights.gate_up),
        down=_linear(weights.down),
        input_norm=weights.input_norm.data_ptr(),
        post_norm=weights.post_norm.data_ptr(),
        query_norm=None if weights.query_norm is None else weights.query_norm.data_ptr(),
        key_norm=None if weights.key_norm is None else weights.key_norm.data_ptr(),
        window=weights.sliding_window or 0,
    )
