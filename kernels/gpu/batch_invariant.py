"""BatchInvariantTritonOps: Triton kernels with results that do not depend on the rest of the batch.

Matrix products use one tile shape for every batch size, with experts as well. Attention treats a decode row as a
prompt of one token and processes all tiles of keys in order, each masked; a masked key adds exactly 0. All other
kernels compute each row by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import AttentionMetadata, PackedExperts, PackedLinear
from ..quantized import Weight
from ..reference import PlainLinear, ReferenceOps
from .attention.prefill import plan_prefill, prefill_attention
from .linear.linear import linear
from .linear.moe import TritonExperts, fused_moe
from .ops import TritonOps
from .table import PrefillShape, prefill_shape


class BatchInvariantTritonOps(TritonOps):
    """The batch-invariant operations, for head shapes that `supports` accepts."""

    def pack_linear(self, weight: Weight, bias: Tensor | None, is_gated: bool = False) -> PackedLinear:
        return ReferenceOps.pack_linear(self, weight, bias, is_gated)  # dequantizes

    def fused_moe(self, x: Tensor, scores: Tensor, packed: PackedExperts, top_k: int, is_normalized: bool) -> Tensor:
        assert isinstance(packed, TritonExperts)
        return fused_moe(x, scores, packed, top_k, is_normalized, is_batch_invariant=True)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, PlainLinear)
        outputs = linear(x, packed.weight, packed.bias, x.dtype)
        return self.silu_and_mul(outputs) if packed.is_gated else outputs

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, PlainLinear)
        return linear(x, packed.weight, packed.bias, torch.float32)

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        head_dim, group = query.shape[2], query.shape[1] // kv_cache.shape[3]
        shape = prefill_shape(self._architecture, head_dim, group, query.element_size())
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        tiles = self._all_tiles(metadata, group, shape)
        if tiles.shape[0]:
            prefill_attention(
                query, kv_cache, layer, metadata, tiles, output, scale, sliding_window, shape, is_batch_invariant=True
            )
        return output

    def _all_tiles(self, metadata: AttentionMetadata, group: int, shape: PrefillShape) -> Tensor:
        """Plan the tiles of all rows; those of decode rows on the device, as a graph cannot record a copy from the
        host."""
        plans = self._plans_of(metadata)
        if plans.prefill_tiles is None:
            device = metadata.seq_lens.device
            decode = torch.zeros((metadata.num_decode_rows, 2), dtype=torch.int32, device=device)
            decode[:, 0] = torch.arange(metadata.num_decode_rows, dtype=torch.int32, device=device)
            plans.prefill_tiles = decode
            if metadata.num_decode_rows < len(metadata.seq_lens_host):
                plans.prefill_tiles = torch.cat([plan_prefill(metadata, group, shape), decode])
        return plans.prefill_tiles
