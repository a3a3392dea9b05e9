"""BatchInvariantTritonOps: Triton kernels with results that do not depend on the rest of the batch.

Matrix products use one tile shape for every batch size, with experts as well. Attention treats a decode row as a
prompt of one token and processes all tiles of keys in order, each masked; a masked key adds exactly 0. All other
kernels compute each row by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import NO_ACTIVATION, Activation, AttentionMetadata, PackedLinear
from ..quantized import Weight
from ..reference import PlainLinear, ReferenceOps
from .attention.prefill import plan_prefill
from .linear.linear import linear
from .ops import TritonOps
from .table import PrefillShape


class BatchInvariantTritonOps(TritonOps):
    """The batch-invariant operations, for head shapes that `supports` accepts."""

    is_batch_invariant = has_exact_drafts = True

    def pack_linear(self, weight: Weight, bias: Tensor | None, activation: Activation = NO_ACTIVATION) -> PackedLinear:
        return ReferenceOps.pack_linear(self, weight, bias, activation)  # dequantizes

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        adapted = self._adapted(x, packed, x.dtype)
        if adapted is not None:
            return adapted
        assert isinstance(packed, PlainLinear)
        return self.activate(linear(x, packed.weight, packed.bias, x.dtype), packed.activation)

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        adapted = self._adapted(x, packed, torch.float32)
        return self._sums(x, packed) if adapted is None else adapted

    def _sums(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, PlainLinear)
        return linear(x, packed.weight, packed.bias, torch.float32)

    def _tiles(self, metadata: AttentionMetadata, group: int, shape: PrefillShape) -> Tensor:
        """Return the tiles of all rows, planned once per step. Those of decode rows are made on the device: a CUDA
        graph would copy from the same host memory at each replay."""
        plans = self._plans_of(metadata)
        tiles = plans.tiles.get(shape.block_m // group)
        if tiles is None:
            device = metadata.seq_lens.device
            decode = torch.zeros((metadata.num_decode_rows, 2), dtype=torch.int32, device=device)
            decode[:, 0] = torch.arange(metadata.num_decode_rows, dtype=torch.int32, device=device)
            tiles = decode
            if metadata.num_decode_rows < len(metadata.seq_lens_host):
                tiles = torch.cat([plan_prefill(metadata, group, shape), decode])
            plans.tiles[shape.block_m // group] = tiles
        return tiles
