"""DeterministicOps: the reference with the same bits for a token whatever it is computed together with.

A matmul, a sum or an exponential may round differently with the shape that it runs in. Here each runs in one shape for
ever: rows are padded to tiles of a fixed number, attention goes through a row's keys in chunks that begin at fixed
positions, in order. So a token's result depends on its own history alone: not on batch, chunk, prefix hit or attempt.
What is left is whether a row's place in its tile matters; that is tried out for each shape, and the tile is made
smaller until it does not (a tile of one row has but one place).

Slower than the reference by what padding and small shapes cost; scripts/bench_sampling.py --deterministic prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .ops import AttentionMetadata, PackedLinear
from .quantized import Weight, as_floats
from .reference import PlainLinear, ReferenceOps

TILE_ROWS = (16, 8, 4, 2, 1)  # tried in this order
ATTENTION_ROWS = 16  # (query, head) pairs of one KV head in a tile
KEY_CHUNK = 256  # keys in a chunk, rounded to whole blocks
_LANES = 32  # copies of a rescaling factor, so that it is computed like the weights beside it


@dataclass(frozen=True)
class _TiledLinear(PlainLinear):
    """A plain linear and the number of rows in which it is computed."""

    tile_rows: int = 1


class DeterministicOps(ReferenceOps):
    """For the CPU. Remembers, for each shape, the tile whose rows all come out alike."""

    def __init__(self) -> None:
        super().__init__()
        self._tile_rows: dict[tuple[object, ...], int] = {}

    def pack_linear(self, weight: Weight, bias: Tensor | None, is_gated: bool = False) -> PackedLinear:
        weight = as_floats(weight)
        plain = PlainLinear(weight, bias, is_gated)
        key = ("linear", *weight.shape, weight.dtype, bias is None, is_gated)
        tile_rows = self._rows_of(key, lambda x: ReferenceOps.linear(self, x, plain), weight.shape[1], weight.dtype)
        return _TiledLinear(weight, bias, is_gated, tile_rows)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, _TiledLinear)
        return _in_tiles(lambda tile: ReferenceOps.linear(self, tile, packed), x, packed.tile_rows)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        key = ("norm", x.shape[-1], x.dtype, weight.dtype)
        norm = super().rms_norm
        tile_rows = self._rows_of(key, lambda tile: norm(tile, weight, eps), x.shape[-1], x.dtype)
        return _in_tiles(lambda tile: norm(tile, weight, eps), x.reshape(-1, x.shape[-1]), tile_rows).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
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
        output = torch.zeros_like(query)
        starts = metadata.query_starts_host
        for row, seq_len in enumerate(metadata.seq_lens_host):
            if seq_len and starts[row + 1] > starts[row]:
                tokens = slice(starts[row], starts[row + 1])
                keys = _RowKeys(kv_cache, layer, metadata.block_tables[row], sliding_window)
                output[tokens] = keys.attend(query[tokens], metadata.positions[tokens], scale)
        return output

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


class _RowKeys:
    """Keys and values of one row in one layer, gathered chunk by chunk as queries reach them."""

    def __init__(self, kv_cache: Tensor, layer: int, block_table: Tensor, window: int | None) -> None:
        self._cache = kv_cache[:, layer]  # [num_blocks, 2, num_kv_heads, block_size, D]
        block_size = kv_cache.shape[4]
        self._blocks_per_chunk = max(1, KEY_CHUNK // block_size)
        self._chunk_size = self._blocks_per_chunk * block_size
        self._table = block_table
        self._window = window
        self._chunks: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, query: Tensor, positions: Tensor, scale: float) -> Tensor:
        """query [Q, H, D] at `positions` [Q] → [Q, H, D]."""
        num_queries, num_heads, head_dim = query.shape
        num_kv_heads = self._cache.shape[2]
        group = num_heads // num_kv_heads
        at_once = max(1, ATTENTION_ROWS // group)
        outputs = []
        for start in range(0, num_queries, at_once):
            part, where = query[start : start + at_once], positions[start : start + at_once]
            count = len(where)
            padded = query.new_zeros((at_once, num_heads, head_dim), dtype=torch.float32)
            padded[:count] = part
            places = where.new_full((at_once,), -1)
            places[:count] = where
            # [at_once, num_kv_heads, group, D] → [num_kv_heads, at_once * group, D]
            tile = padded.view(at_once, num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
            attended = self._attend_tile(tile, places.repeat_interleave(group), scale)
            attended = attended.view(num_kv_heads, at_once, group, head_dim).transpose(0, 1)
            outputs.append(attended[:count].reshape(count, num_heads, head_dim))
        return torch.cat(outputs).to(query.dtype)

    def _attend_tile(self, query: Tensor, positions: Tensor, scale: float) -> Tensor:
        """query [num_kv_heads, M, D] float32 at `positions` [M], -1 = none; online softmax over chunks in order.

        A chunk of which a query sees nothing leaves its state as it was, to the bit.
        """
        largest = query.new_full((*query.shape[:2], 1), -torch.inf)
        total, output = torch.zeros_like(largest), torch.zeros_like(query)
        last = int(positions.max())
        first = 0 if self._window is None else max(0, int(positions[positions >= 0].min()) - self._window + 1)
        for chunk in range(first // self._chunk_size, last // self._chunk_size + 1):
            keys, values = self._chunk(chunk)
            scores = torch.bmm(query, keys) * scale
            scores.masked_fill_(self._hidden(positions, chunk), -torch.inf)
            new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            shift = new_largest.clamp(min=-3e38)
            rescale = (largest - shift).expand(*query.shape[:2], _LANES)
            exponentials = torch.cat([scores - shift, rescale], dim=-1).exp_()
            weights, kept = exponentials[..., :-_LANES].contiguous(), exponentials[..., -1:]
            total = total * kept + weights.sum(-1, keepdim=True)
            output = output * kept + torch.bmm(weights, values)
            largest = new_largest
        return output / total.clamp(min=1e-30)

    def _hidden(self, positions: Tensor, chunk: int) -> Tensor:
        """[M, chunk_size]: keys that lie after a query or before its window."""
        keys = torch.arange(chunk * self._chunk_size, (chunk + 1) * self._chunk_size)
        hidden = keys > positions[:, None]
        if self._window is not None:
            hidden |= keys <= positions[:, None] - self._window
        return hidden

    def _chunk(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Keys [num_kv_heads, D, chunk_size] and values [num_kv_heads, chunk_size, D] in float32."""
        found = self._chunks.get(chunk)
        if found is None:
            blocks = torch.zeros(self._blocks_per_chunk, dtype=torch.int64)  # past the table: the null block, hidden
            known = self._table[chunk * self._blocks_per_chunk : (chunk + 1) * self._blocks_per_chunk]
            blocks[: len(known)] = known
            # [blocks, 2, num_kv_heads, block_size, D] → [2, num_kv_heads, chunk_size, D]
            gathered = self._cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3).float()
            found = self._chunks[chunk] = gathered[0].transpose(1, 2).contiguous(), gathered[1].contiguous()
        return found
