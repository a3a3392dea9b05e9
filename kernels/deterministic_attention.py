"""Attention whose result for a query is the same bits whatever it is computed together with.

The queries of a row go in tiles, tiles of any rows in groups; a group has one shape for ever, padded with nothing. It
goes through its keys in chunks that begin at fixed positions of the rows, by an online softmax. A chunk of which a
query sees nothing leaves that query's state as it was, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .ops import AttentionMetadata

TILE_QUERIES = 16  # (query, head) pairs of one KV head in a tile
KEY_CHUNK = 128  # keys in a chunk, rounded to whole blocks
_LANES = 32  # copies of a rescaling factor, so that it is computed like the weights beside it


class AttentionShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def tile_tokens(self) -> int:
        return max(1, TILE_QUERIES // (self.num_heads // self.num_kv_heads))

    @property
    def chunk_blocks(self) -> int:
        return max(1, KEY_CHUNK // self.block_size)


@dataclass(frozen=True)
class _Group:
    """tokens: [num_tiles, tile_tokens] index into the step's tokens, which end with one that is nobody's."""

    tokens: Tensor
    chunks: list[tuple[Tensor, Tensor]]  # blocks [num_tiles, chunk_blocks]; hidden keys [num_tiles, tile_tokens, chunk]


class AttentionPlan:
    """What one step attends to, for all layers of one window."""

    def __init__(self, metadata: AttentionMetadata, shape: AttentionShape, window: int | None, num_tiles: int) -> None:
        self._metadata, self._shape, self._window = metadata, shape, window
        starts, lens = metadata.query_starts_host, metadata.seq_lens_host
        tiles = [
            (row, range(first, min(first + shape.tile_tokens, starts[row + 1])))
            for row in range(len(lens))
            if lens[row]
            for first in range(starts[row], starts[row + 1], shape.tile_tokens)
        ]
        positions = torch.cat([metadata.positions, metadata.positions.new_full((1,), -1)])
        self._groups = [
            self._group(tiles[first : first + num_tiles], positions, num_tiles)
            for first in range(0, len(tiles), num_tiles)
        ]

    def is_of(self, metadata: AttentionMetadata, shape: AttentionShape, window: int | None) -> bool:
        return self._metadata is metadata and self._shape == shape and self._window == window

    def _group(self, tiles: list[tuple[int, range]], positions: Tensor, num_tiles: int) -> _Group:
        shape, nobody = self._shape, len(positions) - 1
        indices = [[*tokens, *[nobody] * (shape.tile_tokens - len(tokens))] for _, tokens in tiles]
        indices += [[nobody] * shape.tile_tokens] * (num_tiles - len(tiles))
        tokens = torch.tensor(indices)
        places = positions[tokens]
        size = shape.chunk_blocks * shape.block_size
        least = int(places[places >= 0].min())
        first = 0 if self._window is None else max(0, least - self._window + 1) // size
        rows = torch.tensor([row for row, _ in tiles])
        chunks = []
        for chunk in range(first, int(places.max()) // size + 1):
            table = self._metadata.block_tables[rows, chunk * shape.chunk_blocks : (chunk + 1) * shape.chunk_blocks]
            blocks = torch.zeros((num_tiles, shape.chunk_blocks), dtype=torch.int64)  # the null block, hidden
            blocks[: len(tiles), : table.shape[1]] = table
            keys = torch.arange(chunk * size, (chunk + 1) * size)
            hidden = keys > places[..., None]
            if self._window is not None:
                hidden |= keys <= places[..., None] - self._window
            chunks.append((blocks, hidden))
        return _Group(tokens, chunks)

    def attend(self, query: Tensor, cache: Tensor, scale: float) -> Tensor:
        """query [T, H, D]; cache [num_blocks, 2, num_kv_heads, block_size, D] of one layer → [T, H, D]."""
        padded = torch.cat([query, query.new_zeros((1, *query.shape[1:]))]).float()
        output = torch.zeros_like(padded)
        for group in self._groups:
            softmax = _OnlineSoftmax(padded[group.tokens], self._shape)
            for blocks, hidden in group.chunks:
                # [tiles, blocks, 2, num_kv_heads, block_size, D] → [2, tiles, num_kv_heads, chunk, D]
                found = cache[blocks].permute(2, 0, 3, 1, 4, 5).flatten(3, 4).float()
                softmax.add(found[0].flatten(0, 1), found[1].flatten(0, 1), hidden, scale)
            output[group.tokens] = softmax.result()
        return output[:-1].to(query.dtype)


class _OnlineSoftmax:
    """The state of one group: largest score, sum of weights and weighted values of each query."""

    def __init__(self, query: Tensor, shape: AttentionShape) -> None:
        """query: [tiles, tile_tokens, H, D] float32."""
        self._size = query.shape[:2]
        self._num_kv_heads = shape.num_kv_heads
        self._heads = shape.num_heads // shape.num_kv_heads
        parted = query.view(*self._size, shape.num_kv_heads, self._heads, shape.head_dim)
        self._query = parted.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # [tiles · num_kv_heads, M, D]
        self._largest = self._query.new_full((*self._query.shape[:2], 1), -torch.inf)
        self._total, self._output = torch.zeros_like(self._largest), torch.zeros_like(self._query)

    def add(self, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> None:
        """keys, values: [tiles · num_kv_heads, chunk, D]; hidden: [tiles, tile_tokens, chunk]."""
        scores = torch.bmm(self._query, keys.transpose(1, 2).contiguous()) * scale
        parted = scores.view(self._size[0], self._num_kv_heads, self._size[1], self._heads, -1)
        parted.masked_fill_(hidden[:, None, :, None], -torch.inf)
        largest = torch.maximum(self._largest, scores.amax(-1, keepdim=True))
        shift = largest.clamp(min=-3e38)
        rescale = (self._largest - shift).expand(*scores.shape[:2], _LANES)
        exponentials = torch.cat([scores - shift, rescale], dim=-1).exp_()
        weights, kept = exponentials[..., :-_LANES].contiguous(), exponentials[..., -1:]
        self._total = self._total * kept + weights.sum(-1, keepdim=True)
        self._output = self._output * kept + torch.bmm(weights, values)
        self._largest = largest

    def result(self) -> Tensor:
        """[tiles, tile_tokens, H, D]"""
        attended = self._output / self._total.clamp(min=1e-30)
        parted = attended.view(self._size[0], self._num_kv_heads, self._size[1], self._heads, -1)
        return parted.transpose(1, 2).flatten(2, 3)


@torch.inference_mode()
def is_alike_in_groups(shape: AttentionShape, num_tiles: int) -> bool:
    """Whether a tile's result is the same bits at every place of a group of `num_tiles`, beside any others."""
    draw, chunk = torch.Generator().manual_seed(num_tiles), shape.chunk_blocks * shape.block_size
    query = torch.randn(num_tiles, shape.tile_tokens, shape.num_heads, shape.head_dim, generator=draw)
    keys = torch.randn(2, num_tiles, shape.num_kv_heads, chunk, shape.head_dim, generator=draw)

    def attended(query: Tensor, keys: Tensor) -> Tensor:
        softmax = _OnlineSoftmax(query, shape)
        for part in keys, keys.flip(0):
            hidden = torch.zeros(num_tiles, shape.tile_tokens, chunk, dtype=torch.bool)
            softmax.add(part[0].flatten(0, 1), part[1].flatten(0, 1), hidden, 0.3)
        return softmax.result()

    expected = attended(query, keys)
    if not all(
        torch.equal(attended(query.roll(shift, 0), keys.roll(shift, 1)), expected.roll(shift, 0))
        for shift in range(1, num_tiles)
    ):
        return False
    lonely, alone = torch.zeros_like(query), torch.zeros_like(keys)
    lonely[num_tiles // 2], alone[:, num_tiles // 2] = query[0], keys[:, 0]
    return torch.equal(attended(lonely, alone)[num_tiles // 2], expected[0])
