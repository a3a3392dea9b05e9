"""SlotTiles: the rows of a step in tiles that use one adapter; a program of a low-rank product has rows of one tile.

    slots of the tokens → order: rows sorted by slot → tiles: up to ROWS consecutive rows with one slot

With experts a row is a (token, expert) pair, and rows are sorted by expert first. One launch writes both lists on the
device. Its grid and the products' grids depend only on shapes, so that a CUDA graph fits any mix of adapters.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_2
from .matmul import ExpertRows

ROWS = 16  # rows of a tile; with larger tiles, even of prompts, fewer programs would fit on a multiprocessor
CHUNK = 1024  # rows per iteration
TILES = 128  # tiles per iteration
TILE_FIELDS = tl.constexpr(4)


@triton.jit
def write_tiles(tiles, tile, count, slot, expert, place, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Write the tiles, from index `tile` on, of the `count` rows from `place` on; return the index after the last."""
    num_tiles = tl.cdiv(count, ROWS)
    for start in range(0, num_tiles, TILES):
        numbers = start + tl.arange(0, TILES)
        exists = numbers < num_tiles
        at = tiles + (tile + numbers) * TILE_FIELDS
        first = place + numbers * ROWS
        tl.store(at, numbers * 0 + slot, mask=exists)
        tl.store(at + 1, numbers * 0 + expert, mask=exists)
        tl.store(at + 2, first, mask=exists)
        tl.store(at + 3, tl.minimum(first + ROWS, place + count), mask=exists)
    return tile + num_tiles


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def list_slots_kernel(
    slots,  # [num_tokens] int32
    expert_rows,  # [NUM_EXPERTS, num_tokens] int32: the rows of each expert; row r belongs to token r // TOP_K
    expert_counts,  # [NUM_EXPERTS] int32
    order,  # [rows] int32
    tiles,  # [num_tiles, 4] int32: slot, or −1 in a place without a tile; expert; first and end in `order`
    num_tokens,
    num_tiles,
    NUM_SLOTS: tl.constexpr,  # slot 0 included
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
):
    expert = tl.program_id(0)
    count, place, tile = num_tokens, 0, 0
    if HAS_EXPERTS:
        numbers = tl.arange(0, EXPERTS_PAD)
        counts = tl.load(expert_counts + numbers, mask=numbers < NUM_EXPERTS, other=0)
        count = tl.sum(tl.where(numbers == expert, counts, 0), axis=0)
        place = tl.sum(tl.where(numbers < expert, counts, 0), axis=0)
        most = counts // ROWS + tl.minimum(counts, NUM_SLOTS)  # tiles of each expert
        tile = tl.sum(tl.where(numbers < expert, most, 0), axis=0)
    end = tile + count // ROWS + tl.minimum(count, NUM_SLOTS)
    if expert == NUM_EXPERTS - 1:
        end = num_tiles
    slot = 0
    while slot < NUM_SLOTS:
        num_found, following = 0, NUM_SLOTS
        for start in range(0, count, CHUNK):
            rows = start + tl.arange(0, CHUNK)
            exists = rows < count
            if HAS_EXPERTS:
                rows = tl.load(expert_rows + expert.to(tl.int64) * num_tokens + rows, mask=exists, other=0)
            found = tl.load(slots + rows // TOP_K, mask=exists, other=NUM_SLOTS)
            ones = (found == slot).to(tl.int32)
            places = place + num_found + tl.cumsum(ones, axis=0) - ones
            tl.store(order + places, rows, mask=found == slot)
            num_found += tl.sum(ones, axis=0)
            following = tl.minimum(following, tl.min(tl.where(found > slot, found, NUM_SLOTS), axis=0))
        tile = write_tiles(tiles, tile, num_found, slot, expert, place, ROWS, TILES)
        place += num_found
        slot = following
    for start in range(tile, end, TILES):
        unused = start + tl.arange(0, TILES)
        tl.store(tiles + unused * TILE_FIELDS, unused * 0 - 1, mask=unused < end)


@dataclass(frozen=True, eq=False)
class SlotTiles:
    """The rows of a step sorted by expert and slot, and their tiles; row r belongs to token r // top_k."""

    order: Tensor  # [num_rows] int32
    tiles: Tensor  # [n, 4] int32, see list_slots_kernel
    top_k: int

    @property
    def num_rows(self) -> int:
        return self.order.shape[0]


def list_slots(slots: Tensor, num_slots: int, experts: ExpertRows | None = None) -> SlotTiles:
    """Sort the rows of a step by expert and adapter slot, cut them into tiles, and return both.

    slots: [T] int32 in [0, num_slots], 0 = no adapter; T ≥ 1. experts: the (token, expert) pairs that are the rows;
    None: each token is a row.
    """
    num_tokens = slots.shape[0]
    num_rows, num_experts = num_tokens, 1
    if experts is not None:
        num_rows, num_experts = experts.num_pairs, experts.rows.shape[0]
    num_tiles = num_rows // ROWS + min(num_rows, num_experts * (num_slots + 1))
    order = torch.empty(num_rows, dtype=torch.int32, device=slots.device)
    tiles = torch.empty((num_tiles, TILE_FIELDS.value), dtype=torch.int32, device=slots.device)
    list_slots_kernel[(num_experts,)](
        slots,
        slots if experts is None else experts.rows,
        slots if experts is None else experts.counts,
        order,
        tiles,
        num_tokens,
        num_tiles,
        NUM_SLOTS=num_slots + 1,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=next_power_of_2(num_experts),
        TOP_K=num_rows // num_tokens,
        HAS_EXPERTS=experts is not None,
        ROWS=ROWS,
        CHUNK=CHUNK,
        TILES=TILES,
        num_warps=4,
    )
    return SlotTiles(order, tiles, num_rows // num_tokens)
