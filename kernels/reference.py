"""ReferenceOps: every operation of `ops.py` in plain torch, for any device and dtype.

The specification that other kernels are compared with, and the fallback where there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fp8_cache
from .attention_plan import TILE_BYTES, CacheLayout, Tile, make_plan
from .ops import AttentionMetadata, DecoderWeights, FusedDecoder, PackedExperts, PackedLinear, RowColumns
from .quantized import Weight, as_floats


@dataclass(frozen=True)
class PlainLinear:
    """A weight [out, in] and bias [out] as they came."""

    weight: Tensor
    bias: Tensor | None
    is_gated: bool = False

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] // (2 if self.is_gated else 1)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class SeparateExperts:
    """Two packed linears of each expert."""

    gate_up: list[PackedLinear]
    down: list[PackedLinear]

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for packed in (*self.gate_up, *self.down))


@dataclass
class _Step:
    """What one step's metadata and one cache layout imply for every layer."""

    metadata: AttentionMetadata
    layout: CacheLayout
    written: Tensor | None  # tokens whose keys are stored; None: all of them
    slot_rows: Tensor  # [written * num_kv_heads] int64: their rows in the cache seen as [rows, D], layer 0, keys
    tiles_by_window: dict[int | None, list[Tile]] = field(default_factory=dict)


class ReferenceOps:
    """Stateless but for what the last step's metadata implies, kept so that only the first layer computes it."""

    def __init__(self, tile_bytes: int = TILE_BYTES) -> None:
        self._tile_bytes = tile_bytes  # bound on the keys and values gathered at once
        self._step: _Step | None = None

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        weight = plain_table(table)
        rows = token_ids.long() - first_id
        is_foreign = (rows < 0) | (rows >= weight.shape[0])
        return F.embedding(rows.masked_fill(is_foreign, 0), weight).masked_fill(is_foreign[:, None], 0)

    def begin_step(self, token_ids: Tensor, rows: RowColumns, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        last_tokens = rows.last_tokens[(-1 - token_ids).clamp(min=0)]
        return self.embedding(torch.where(token_ids < 0, last_tokens, token_ids), table, first_id)

    def begin_decode(
        self,
        row_ids: Tensor,
        rows: RowColumns,
        metadata: AttentionMetadata,
        block_size: int,
        table: Tensor | PackedLinear,
        first_id: int,
    ) -> Tensor:
        is_padding = row_ids < 0
        live = row_ids.clamp(min=0)
        positions, tables = rows.num_computed[live], rows.block_tables[live]
        blocks = tables.gather(1, (positions // block_size).long()[:, None])[:, 0].long()
        slots = blocks * block_size + positions % block_size
        metadata.positions.copy_(positions.masked_fill(is_padding, 0))
        metadata.slots.copy_(slots.masked_fill(is_padding, -1))
        metadata.seq_lens.copy_((positions + 1).masked_fill(is_padding, 0))
        metadata.block_tables[:, : tables.shape[1]] = tables
        rows.num_computed.index_add_(0, live, (~is_padding).int())
        return self.embedding(rows.last_tokens[live].masked_fill(is_padding, first_id - 1), table, first_id)

    def pack_linear(self, weight: Weight, bias: Tensor | None, is_gated: bool = False) -> PackedLinear:
        return PlainLinear(as_floats(weight), bias, is_gated)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, PlainLinear)
        outputs = F.linear(x, packed.weight, packed.bias)
        return self.silu_and_mul(outputs) if packed.is_gated else outputs

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self.linear(x, packed).float()

    def pack_experts(self, gate_up: Sequence[Weight], down: Sequence[Weight]) -> PackedExperts:
        return SeparateExperts(
            [self.pack_linear(weight, None, is_gated=True) for weight in gate_up],
            [self.pack_linear(weight, None) for weight in down],
        )

    def mix_experts(
        self, x: Tensor, scores: Tensor, packed: PackedExperts, num_chosen: int, is_normalized: bool
    ) -> Tensor:
        assert isinstance(packed, SeparateExperts)
        weights, experts = route(scores, num_chosen, is_normalized)
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted(set(experts.flatten().tolist())):
            tokens, places = torch.where(experts == expert)
            answers = self.linear(self.linear(x[tokens], packed.gate_up[expert]), packed.down[expert])
            mixed.index_add_(0, tokens, answers * weights[tokens, places, None])
        return mixed.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return F.rms_norm(residual, weight.shape, weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [..., 2n] holds gate and up side by side: silu(gate) * up, [..., n]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def prepare_heads(
        self,
        heads: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos_sin: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        num_kv_heads = kv_cache.shape[3]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            query.copy_(self.rms_norm(query, norms[0], eps))
            key.copy_(self.rms_norm(key, norms[1], eps))
        self.rotary(heads[:, : num_heads + num_kv_heads], metadata.positions, cos_sin)
        self.store_kv(key, value, kv_cache, layer, metadata)
        return query

    def rotary(self, heads: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate `heads` [T, H, D] in place; any strides, last one 1. positions: [T] int64, each < P."""
        cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)  # [T, 1, D / 2] each
        first, second = heads.chunk(2, dim=-1)
        rotated_first = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(rotated_first)

    def store_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, metadata: AttentionMetadata) -> None:
        """Write key and value [T, num_kv_heads, D] to the step's slots, NaN and infinities as 0."""
        step = self._step_of(metadata, kv_cache)
        width, block_size = kv_cache.shape[-1], step.layout.block_size
        rows_per_side = step.layout.num_kv_heads * block_size
        for side, heads in enumerate((key, value)):
            finite = torch.nan_to_num(heads, nan=0.0, posinf=0.0, neginf=0.0)
            if step.written is not None:
                finite = finite[step.written]
            target = step.slot_rows + (2 * layer + side) * rows_per_side
            if fp8_cache.is_fp8(kv_cache):
                numbers, scales = fp8_cache.parts(kv_cache.view(-1, block_size * width), block_size)
                where = target // block_size, target % block_size
                numbers[where], scales[where] = fp8_cache.encode(finite.reshape(-1, finite.shape[-1]))
            else:
                kv_cache.view(-1, width).index_copy_(0, target, finite.reshape(-1, width))

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        step = self._step_of(metadata, kv_cache)
        tiles = step.tiles_by_window.get(sliding_window)
        if tiles is None:
            tiles = make_plan(metadata, step.layout, sliding_window, query.dtype, self._tile_bytes)
            step.tiles_by_window[sliding_window] = tiles
        is_padded = query.shape[0] != metadata.query_starts_host[-1] or 0 in metadata.seq_lens_host
        output = torch.zeros_like(query) if is_padded else torch.empty_like(query)
        for tile in tiles:
            heads_at_once = self._tile_bytes // tile.bytes_per_kv_head(step.layout)
            output[tile.tokens] = _attend(query[tile.tokens], kv_cache, layer, tile, scale, heads_at_once)
        return output

    def fuse_decoder(self, weights: DecoderWeights) -> FusedDecoder | None:
        return None

    def _step_of(self, metadata: AttentionMetadata, kv_cache: Tensor) -> _Step:
        layout = CacheLayout.of(kv_cache)
        step = self._step
        if step is None or step.metadata is not metadata or step.layout != layout:
            step = self._step = _make_step(metadata, layout)
        return step


def plain_table(table: Tensor | PackedLinear) -> Tensor:
    """An embedding table [n, hidden], which may be the weight of a linear as well."""
    weight = table.weight if isinstance(table, PlainLinear) else table
    assert isinstance(weight, Tensor)
    return weight


def route(scores: Tensor, num_chosen: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Weights [T, num_chosen] float32 and numbers of the experts with the highest scores [T, E], likeliest first; of
    equals the lower number first."""
    ranked, order = scores.softmax(dim=-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    weights, experts = ranked[:, :num_chosen], order[:, :num_chosen]
    if is_normalized:
        total = weights[:, :1].clone()
        for place in range(1, num_chosen):  # one by one: torch's sum may round by the number of rows
            total += weights[:, place : place + 1]
        weights = weights / total
    return weights, experts


def _make_step(metadata: AttentionMetadata, layout: CacheLayout) -> _Step:
    slots, written = metadata.slots, None
    if slots.device.type == "cpu":
        if slots.numel() and int(slots.min()) < 0:
            written = (slots >= 0).nonzero()[:, 0]
            slots = slots[written]
    else:
        slots = slots.clamp(min=0)  # into the null block: choosing tokens would wait for the device
    blocks = slots // layout.block_size
    rows_per_block = layout.num_layers * 2 * layout.num_kv_heads * layout.block_size
    heads = torch.arange(layout.num_kv_heads, device=slots.device) * layout.block_size
    token_rows = blocks * rows_per_block + slots % layout.block_size
    return _Step(metadata, layout, written, (token_rows[:, None] + heads).flatten())


def _attend(query: Tensor, kv_cache: Tensor, layer: int, tile: Tile, scale: float, heads_at_once: int) -> Tensor:
    """Attention of one tile, query [B * Q, H, D] → [B * Q, H, D], some KV heads at once (at least one).

    Scores and softmax are float32 inside scaled_dot_product_attention, whatever the dtype.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, num_rows, num_kv_heads, _ = tile.tiles.shape
    group = num_heads // num_kv_heads
    cache_tiles = kv_cache.view(-1, kv_cache.shape[4] * kv_cache.shape[5])
    # [B * Q, H, D] → [B, H, Q, D]
    query = query.view(num_rows, num_tokens // num_rows, num_heads, head_dim).transpose(1, 2)
    mask = tile.mask(query.dtype)
    heads_at_once = max(1, min(num_kv_heads, heads_at_once))
    parts = []
    for head in range(0, num_kv_heads, heads_at_once):
        index = tile.tiles[:, :, head : head + heads_at_once] + layer * 2 * num_kv_heads
        gathered = cache_tiles.index_select(0, index.flatten())
        if fp8_cache.is_fp8(kv_cache):
            gathered = fp8_cache.decode(gathered, kv_cache.shape[4], query.dtype)
        key, value = gathered.view(2, num_rows, index.shape[2], -1, head_dim)  # [B, heads, S, D] each
        part = query[:, head * group : (head + heads_at_once) * group]
        parts.append(F.scaled_dot_product_attention(part, key, value, mask, scale=scale, enable_gqa=group > 1))
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return output.transpose(1, 2).reshape(num_tokens, num_heads, head_dim)
