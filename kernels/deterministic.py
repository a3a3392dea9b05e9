"""DeterministicOps: the reference with the same bits for a token whatever it is computed together with.

A matmul, a sum or an exponential may round differently with the shape that it runs in. Here each runs in one shape for
ever: rows are padded to tiles of a fixed number, tiles of queries to groups of a fixed number, attention goes through a
row's keys in chunks that begin at fixed positions, in order. So a token's result depends on its own history alone: not
on batch, chunk, prefix hit or attempt. What is left is whether a place in a tile or group matters; that is tried out
for each shape, and the tile or group is made smaller until it does not (one of one has but one place).

Linears and norms are the C kernels' where there are any: they compute each row by itself, in one order.

Slower than the kernels by what padding and small shapes cost; `scripts/bench_sampling.py --with-deterministic` prints
by how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .deterministic_attention import AttentionPlan, AttentionShape, is_alike_in_groups
from .ops import AttentionMetadata, PackedLinear
from .quantized import Weight, as_floats
from .reference import PlainLinear, ReferenceOps

if TYPE_CHECKING:
    from .cpu.cpu_ops import CpuOps

TILE_ROWS = (16, 8, 4, 2, 1)  # tried in this order


@dataclass(frozen=True)
class _TiledLinear(PlainLinear):
    """A plain linear and the number of rows in which it is computed."""

    tile_rows: int = 1


class DeterministicOps(ReferenceOps):
    """For the CPU. Remembers, for each shape, the tile whose rows all come out alike."""

    def __init__(self, kernels: CpuOps | None = None) -> None:
        super().__init__()
        self._kernels = kernels
        self._tile_rows: dict[tuple[object, ...], int] = {}
        self._plan: AttentionPlan | None = None

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        if self._kernels is not None:
            return self._kernels.embedding(token_ids, table, first_id)
        return super().embedding(token_ids, table, first_id)

    def pack_linear(self, weight: Weight, bias: Tensor | None, is_gated: bool = False) -> PackedLinear:
        weight = as_floats(weight)
        if self._kernels is not None:
            return self._kernels.pack_linear(weight, bias, is_gated)
        plain = PlainLinear(weight, bias, is_gated)
        key = ("linear", *weight.shape, weight.dtype, bias is None, is_gated)
        tile_rows = self._rows_of(key, lambda x: ReferenceOps.linear(self, x, plain), weight.shape[1], weight.dtype)
        return _TiledLinear(weight, bias, is_gated, tile_rows)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if self._kernels is not None:
            return self._kernels.linear(x, packed)
        assert isinstance(packed, _TiledLinear)
        return _in_tiles(lambda tile: ReferenceOps.linear(self, tile, packed), x, packed.tile_rows)

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return super().logits(x, packed) if self._kernels is None else self._kernels.logits(x, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._kernels is not None:
            return self._kernels.rms_norm(x, weight, eps)
        key = ("norm", x.shape[-1], x.dtype, weight.dtype)
        norm = super().rms_norm
        tile_rows = self._rows_of(key, lambda tile: norm(tile, weight, eps), x.shape[-1], x.dtype)
        return _in_tiles(lambda tile: norm(tile, weight, eps), x.reshape(-1, x.shape[-1]), tile_rows).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._kernels is not None:
            return self._kernels.add_rms_norm(x, residual, weight, eps)
        residual += x
        return self.rms_norm(residual, weight, eps)

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        num_heads, num_kv_heads, block_size = query.shape[1], kv_cache.shape[3], kv_cache.shape[4]
        shape = AttentionShape(num_heads, num_kv_heads, query.shape[2], block_size)
        if self._plan is None or not self._plan.is_of(metadata, shape, sliding_window):
            num_tiles = self._num_tiles_of(shape)
            self._plan = AttentionPlan(metadata, shape, sliding_window, num_tiles)
        return self._plan.attend(query, kv_cache[:, layer], scale)

    def _num_tiles_of(self, shape: AttentionShape) -> int:
        """The most tiles of queries that come out alike at every place of their group."""
        key = ("attention", shape)
        if key not in self._tile_rows:
            self._tile_rows[key] = next(count for count in TILE_ROWS if is_alike_in_groups(shape, count))
        return self._tile_rows[key]

    def _rows_of(
        self, key: tuple[object, ...], function: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype
    ) -> int:
        """The most rows of a tile in which `function` [rows, width] → [rows, n] treats each alike."""
        rows = self._tile_rows.get(key)
        if rows is None:
            rows = next(rows for rows in TILE_ROWS if _is_alike(function, rows, width, dtype))
            self._tile_rows[key] = rows
        return rows


@torch.inference_mode()
def _is_alike(function: Callable[[Tensor], Tensor], rows: int, width: int, dtype: torch.dtype) -> bool:
    """Whether a row's result is the same bits at every place of a tile, beside any others."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)
    expected = function(x)
    for shift in range(1, rows):
        if not torch.equal(function(x.roll(shift, 0)), expected.roll(shift, 0)):
            return False
    alone = torch.zeros_like(x)
    alone[rows // 2] = x[0]
    return torch.equal(function(alone)[rows // 2], expected[0])


def _in_tiles(function: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """`function` over x [T, width] in tiles of exactly `rows` rows."""
    num_tokens = x.shape[0]
    num_tiles = -(-num_tokens // rows)
    padded = x.new_zeros((num_tiles * rows, x.shape[1]))
    padded[:num_tokens] = x
    if num_tiles == 0:
        return function(x.new_zeros((rows, x.shape[1])))[:0]
    tiles = [function(padded[start : start + rows]) for start in range(0, num_tiles * rows, rows)]
    return torch.cat(tiles)[:num_tokens] if num_tiles > 1 else tiles[0][:num_tokens]
