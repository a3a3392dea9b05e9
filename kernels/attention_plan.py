"""AttentionPlan: which blocks a step's reference attention gathers, which tokens ask them, and what they may see.

Made once per step and reused by every layer: a layer only adds its own offset to the indices. Decode rows of similar
length share a tile, so that one long row does not pad all others; prefill rows are cut into chunks of queries, so that
a mask is bounded and a chunk gathers no key that lies after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .ops import AttentionMetadata

TILE_BYTES = 256 << 20  # gathered keys and values of one tile
QUERY_CHUNK = 256  # queries of a prefill row in one tile
KEPT_MASK_ELEMENTS = 1 << 24  # masks of one plan that are kept for all layers; the rest is made anew for each


@dataclass(frozen=True)
class CacheLayout:
    """The numbers of a KV cache [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    block_bytes: int  # of one layer, keys and values

    @classmethod
    def of(cls, kv_cache: Tensor) -> CacheLayout:
        _, num_layers, _, num_kv_heads, block_size, width = kv_cache.shape
        block_bytes = 2 * num_kv_heads * block_size * width * kv_cache.element_size()
        return cls(num_layers, num_kv_heads, block_size, block_bytes)


class Tile:
    """One attention call: B rows of Q queries each over S = num_blocks * block_size gathered positions."""

    def __init__(
        self, tokens: slice | Tensor, tiles: Tensor, positions: Tensor, keys: Tensor, window: int | None
    ) -> None:
        self.tokens = tokens  # where its B * Q queries stand in the step
        self.tiles = tiles  # [2, B, num_kv_heads, num_blocks] int64: [block_size, head_dim] tiles of layer 0
        self._positions = positions  # [B, Q]
        self._keys = keys  # [B, S]: position of each gathered key
        self._window = window
        self._mask: Tensor | None = None

    def bytes_per_kv_head(self, layout: CacheLayout) -> int:
        """What gathering the keys and values of one head takes."""
        _, num_rows, num_kv_heads, num_blocks = self.tiles.shape
        return num_rows * num_blocks * layout.block_bytes // num_kv_heads

    @property
    def mask_elements(self) -> int:
        return self._positions.numel() * self._keys.shape[1]

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, Q, S]: 0 where the query sees the key, -inf elsewhere."""
        if self._mask is not None:
            return self._mask
        query, key = self._positions[:, :, None], self._keys[:, None, :]
        hidden = key > query
        if self._window is not None:
            hidden |= key <= query - self._window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None]

    def keep_mask(self, dtype: torch.dtype) -> None:
        self._mask = self.mask(dtype)


def make_plan(
    metadata: AttentionMetadata, layout: CacheLayout, window: int | None, dtype: torch.dtype, tile_bytes: int
) -> list[Tile]:
    """The tiles of one step for layers with this sliding window; masks are made in the queries' dtype."""
    groups = decode_groups(metadata, layout, window, tile_bytes)
    tiles = [_decode_tile(metadata, layout, window, rows) for rows in groups]
    tiles.extend(_prefill_tiles(metadata, layout, window))
    kept = 0
    for tile in tiles:
        kept += tile.mask_elements
        if kept <= KEPT_MASK_ELEMENTS:
            tile.keep_mask(dtype)
    return tiles


def _block_span(first_query: int, last_query: int, window: int | None, block_size: int) -> range:
    """Indices in a row's block table of the blocks that queries at these positions can see."""
    first_key = 0 if window is None else max(0, first_query - window + 1)
    return range(first_key // block_size, last_query // block_size + 1)


def decode_groups(
    metadata: AttentionMetadata, layout: CacheLayout, window: int | None, tile_bytes: int
) -> Iterator[list[int]]:
    """Decode rows that share a tile: its padding is at most 32 blocks or a quarter, its size at most `tile_bytes`.

    Ends in tiles of one row where a row alone is larger than that.
    """
    counts = {
        row: len(_block_span(length - 1, length - 1, window, layout.block_size))
        for row, length in enumerate(metadata.seq_lens_host[: metadata.num_decode_rows])
        if length > 0
    }
    group: list[int] = []
    longest = padding = 0
    for row in sorted(counts, key=counts.__getitem__, reverse=True):
        padding += longest - counts[row] if group else 0
        num_blocks = longest * (len(group) + 1)
        if group and (padding > max(32, num_blocks // 4) or num_blocks * layout.block_bytes > tile_bytes):
            yield sorted(group)
            group = []
        if not group:
            longest, padding = counts[row], 0
        group.append(row)
    if group:
        yield sorted(group)


def _decode_tile(metadata: AttentionMetadata, layout: CacheLayout, window: int | None, rows: list[int]) -> Tile:
    device = metadata.block_tables.device
    lengths = [metadata.seq_lens_host[row] for row in rows]
    spans = [_block_span(length - 1, length - 1, window, layout.block_size) for length in lengths]
    is_run = rows[-1] - rows[0] + 1 == len(rows)
    tokens = slice(rows[0], rows[-1] + 1) if is_run else torch.tensor(rows, device=device)
    first_blocks = torch.tensor([[span.start] for span in spans], device=device)
    columns = first_blocks + torch.arange(max(map(len, spans)), device=device)
    # A shorter row's columns may run past the table; what they gather is masked, it only must exist.
    tables = metadata.block_tables[tokens].long()
    blocks = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
    positions = torch.tensor([[length - 1] for length in lengths], device=device)
    return Tile(tokens, _tiles(blocks, layout), positions, _keys(columns, layout), window)


def _prefill_tiles(metadata: AttentionMetadata, layout: CacheLayout, window: int | None) -> Iterator[Tile]:
    starts = metadata.query_starts_host
    for row in range(metadata.num_decode_rows, len(metadata.seq_lens_host)):
        offset = metadata.seq_lens_host[row] - starts[row + 1]  # position of a token - its index in the step
        for start in range(starts[row], starts[row + 1], QUERY_CHUNK):
            stop = min(start + QUERY_CHUNK, starts[row + 1])
            span = _block_span(offset + start, offset + stop - 1, window, layout.block_size)
            blocks = metadata.block_tables[row, span.start : span.stop].long()[None]
            columns = torch.arange(span.start, span.stop, device=blocks.device)[None]
            positions = metadata.positions[start:stop][None]
            yield Tile(slice(start, stop), _tiles(blocks, layout), positions, _keys(columns, layout), window)


def _tiles(blocks: Tensor, layout: CacheLayout) -> Tensor:
    """Block ids [B, n] → [2, B, num_kv_heads, n], indices into the cache seen as [tiles, block_size, head_dim]."""
    heads = torch.arange(2 * layout.num_kv_heads, device=blocks.device).view(2, 1, layout.num_kv_heads, 1)
    return blocks[None, :, None, :] * (layout.num_layers * 2 * layout.num_kv_heads) + heads


def _keys(columns: Tensor, layout: CacheLayout) -> Tensor:
    """Table columns [B, n] → positions [B, n * block_size] of the keys in their blocks."""
    offsets = torch.arange(layout.block_size, device=columns.device)
    return (columns[:, :, None] * layout.block_size + offsets).flatten(1)
