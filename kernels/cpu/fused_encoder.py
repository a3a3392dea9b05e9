"""CpuEncoder: the layers of an encoder in C (step.c). The rows of an image or clip may be split over several calls."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref

import torch
from torch import Tensor

from ..contract import AttentionMetadata, LayerWeights
from . import library as c
from .fused_decoder import LayerOwner, layer_struct

CACHE_LAYERS = 2  # one for the layer that a call completes, one for the layer that it starts


class CpuEncoder:
    """FusedEncoder in C, with the scratch memory and the attention plans of its owner."""

    def __init__(self, owner: LayerOwner, layers: Sequence[LayerWeights], num_heads: int, head_dim: int) -> None:
        self._owner, self._weights = owner, layers
        self._layers = (c.Layer * len(layers))(*(layer_struct(each) for each in layers))
        for index, each in enumerate(self._layers):
            each.attention.cache_layer = index % CACHE_LAYERS
        self._shape = (num_heads, num_heads, head_dim, 0)
        assert layers[0].attention is not None, "layers of encoders attend"
        self._hidden_size = layers[0].attention.qkv.in_features
        self._decoder = c.Decoder(
            layers=addressof(self._layers),
            num_layers=len(layers),
            hidden_size=self._hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            residual_scale=1.0,
        )
        self.width = int(owner.library.encoder_width(byref(self._decoder)))
        self._numbers = torch.empty(0, dtype=torch.int64)  # 0, 1, …

    def __call__(
        self,
        layer: int,
        hidden: Tensor,
        heads: Tensor,
        kv_cache: Tensor,
        first_row: int,
        metadata: AttentionMetadata | None,
        cos_sin: Tensor | None,
    ) -> None:
        num_rows, num_rotated = len(hidden), 0 if cos_sin is None else cos_sin.shape[1]
        assert hidden.shape == (num_rows, self._hidden_size) and heads.shape == (num_rows, self.width)
        assert hidden.is_contiguous() and heads.is_contiguous() and kv_cache.is_contiguous()
        assert (metadata is None) == (layer < 0) and kv_cache.shape[1] == CACHE_LAYERS
        if len(self._numbers) < first_row + num_rows:
            self._numbers = torch.arange(first_row + num_rows)
        if layer + 1 < len(self._layers):
            self._layers[layer + 1].attention.rules.num_rotated = num_rotated
        places = c.CacheGroup(
            kv_cache=kv_cache.data_ptr(),
            block_stride=kv_cache.stride(0) * kv_cache.element_size(),
            block_size=kv_cache.shape[4],
            slots=self._numbers[first_row:].data_ptr(),
        )
        step = c.Step(
            positions=self._numbers.data_ptr(),
            num_tokens=num_rows,
            groups=addressof(places),
            hidden=hidden.data_ptr(),
        )
        if cos_sin is not None:
            assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous() and len(cos_sin) == num_rows
            step.cos_sin = cos_sin.data_ptr()
        library = self._owner.library
        scratch = self._owner.scratch(library.decoder_scratch(byref(self._decoder), num_rows))
        library.encoder_step(
            byref(self._decoder),
            byref(step),
            layer,
            None if metadata is None else self._owner.plan_of(metadata, *self._shape).address,
            heads.data_ptr(),
            scratch.data_ptr(),
            torch.get_num_threads(),
        )
