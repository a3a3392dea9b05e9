"""Attention of rows with one query token over the paged cache: split into splits of keys, then merged.

All query heads of a KV head are one program's rows, so that keys and values are read once. A row's keys are cut into
at most MAX_SPLITS splits by its own length alone; a list of (row, split) made on the device, once per step, is shared
out over a static grid. So one CUDA graph serves all lengths, long rows are spread over the chip, and a row's result
depends on nothing but the row.

    seq_lens → plan_kernel → items → decode_kernel → output of rows with one split, else partials → merge_kernel
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...fp8_cache import is_fp8
from ..launch import next_power_of_2
from ..table import DecodeShape
from .attention import LOG2_E, NO_SCORE, attend_tile, kernel_views, mean_value, tile_bases

MAX_SPLITS = 16  # of one row: bounds the partials
PLAN_ROWS = 256  # of which a program that plans counts the splits at once
MAX_PROGRAMS = 2048  # over items and KV heads: some waves on any chip; more items are shared out among them


@triton.jit
def split_tiles(
    length, window, TILE: tl.constexpr, MIN_TILES: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """First tile that a row's last token sees, tiles from there on, tiles in each split; elementwise over lengths."""
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0) // TILE
    num_tiles = (length + TILE - 1) // TILE - first
    return first, num_tiles, tl.maximum((num_tiles + NUM_SPLITS - 1) // NUM_SPLITS, MIN_TILES)


@triton.jit(do_not_specialize=["num_rows"])
def plan_kernel(
    seq_lens,  # [R]
    items,  # [1 + R * NUM_SPLITS] int32: their number, then row * NUM_SPLITS + split of each
    num_rows,
    window,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per row; each counts the splits of the rows before it, some at once."""
    row = tl.program_id(0)
    before, mine = row * 0, row * 0
    for start in range(0, row + 1, ROWS):
        rows = start + tl.arange(0, ROWS)
        lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
        _, num_tiles, tiles = split_tiles(lengths, window, TILE, MIN_TILES, NUM_SPLITS, HAS_WINDOW)
        counts = (num_tiles + tiles - 1) // tiles
        before += tl.sum(tl.where(rows < row, counts, 0), axis=0)
        mine += tl.sum(tl.where(rows == row, counts, 0), axis=0)
    splits = tl.arange(0, NUM_SPLITS)
    tl.store(items + 1 + before + splits, row * NUM_SPLITS + splits, mask=splits < mine)
    if row == num_rows - 1:
        tl.store(items, before + mine)


@triton.jit(do_not_specialize=["table_stride"])  # changes with the step
def decode_kernel(
    query,  # [T, H, D], token stride given
    kv_cache,
    scales,  # of an fp8 cache: its memory as float32
    block_tables,  # [R, table_stride]
    seq_lens,
    items,
    output,  # [T, H, D] contiguous
    partials,  # [R, H, NUM_SPLITS, D] float32
    partial_logs,  # [R, H, NUM_SPLITS] float32: log2 of the sum of 2^score
    scale,
    cap,
    window,
    layer_offset,  # of this layer's keys in a block
    block_stride,
    query_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    kv_head = tl.program_id(1)
    members = tl.arange(0, GROUP_PAD)
    heads = kv_head * GROUP + members
    dims = tl.arange(0, DIM_PAD)
    exists = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    keys_base, values_base, scale_bases = tile_bases(
        kv_cache, scales, layer_offset, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, IS_FP8
    )
    num_items = tl.load(items)
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = tl.load(items + 1 + index)
        row = (item // NUM_SPLITS).to(tl.int64)
        split = item % NUM_SPLITS
        length = tl.load(seq_lens + row)
        first, num_tiles, tiles = split_tiles(length, window, TILE, MIN_TILES, NUM_SPLITS, HAS_WINDOW)
        start = (first + split * tiles) * TILE
        stop = tl.minimum(start + tiles * TILE, length)
        q = tl.load(query + row * query_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=exists, other=0.0)
        positions = tl.full([GROUP_PAD], 0, tl.int32) + (length - 1)
        table = block_tables + row * table_stride
        acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        m_i = tl.full([GROUP_PAD], NO_SCORE, tl.float32)
        l_i = tl.zeros([GROUP_PAD], tl.float32)
        # Each tile is masked: a last one apart, outside the pipeline, would wait for its keys from the begin.
        for tile_start in range(start, stop, TILE):
            acc, m_i, l_i = attend_tile(
                q, positions, acc, m_i, l_i, keys_base, values_base, scale_bases, table, tile_start, length, scale,
                cap, window, block_stride, BLOCK_SIZE, HEAD_DIM, DIM_PAD, TILE, True, HAS_WINDOW, HAS_CAP, IS_FP8,
            )  # fmt: skip
        acc = mean_value(acc, l_i, IS_FP8)
        at = row * (NUM_KV_HEADS * GROUP) + heads
        if num_tiles <= tiles:
            tl.store(output + at[:, None] * HEAD_DIM + dims[None, :], acc.to(output.dtype.element_ty), mask=exists)
        else:
            slot = at * NUM_SPLITS + split
            tl.store(partials + slot[:, None] * HEAD_DIM + dims[None, :], acc, mask=exists)
            tl.store(partial_logs + slot, m_i + tl.log2(l_i), mask=members < GROUP)


@triton.jit
def merge_kernel(
    partials,
    partial_logs,
    seq_lens,
    output,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """One program per (row, query head): join the row's splits; zeros for a row without tokens."""
    row = tl.program_id(0).to(tl.int64)
    at = row * NUM_HEADS + tl.program_id(1)
    length = tl.load(seq_lens + row)
    _, num_tiles, tiles = split_tiles(length, window, TILE, MIN_TILES, NUM_SPLITS, HAS_WINDOW)
    num_splits = (num_tiles + tiles - 1) // tiles
    if num_splits != 1:
        dims = tl.arange(0, DIM_PAD)
        splits = tl.arange(0, NUM_SPLITS)
        logs = tl.load(partial_logs + at * NUM_SPLITS + splits, mask=splits < num_splits, other=NO_SCORE)
        weights = tl.where(splits < num_splits, tl.exp2(logs - tl.max(logs, axis=0)), 0.0)
        exists = (splits < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
        rows = tl.load(
            partials + (at * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :], mask=exists, other=0.0
        )
        merged = tl.sum(rows * weights[:, None], axis=0) / tl.maximum(tl.sum(weights, axis=0), 1e-30)
        tl.store(output + at * HEAD_DIM + dims, merged.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def plan_decode(seq_lens: Tensor, sliding_window: int | None, shape: DecodeShape) -> Tensor:
    """The items of one step's decode rows, for all layers of this window. seq_lens: [R] int32 → [1 + R · 16] int32."""
    num_rows = seq_lens.shape[0]
    items = torch.empty(1 + num_rows * MAX_SPLITS, dtype=torch.int32, device=seq_lens.device)
    plan_kernel[(num_rows,)](
        seq_lens,
        items,
        num_rows,
        sliding_window or 0,
        TILE=shape.tile,
        MIN_TILES=shape.min_tiles,
        NUM_SPLITS=MAX_SPLITS,
        HAS_WINDOW=sliding_window is not None,
        ROWS=PLAN_ROWS,
        num_warps=4,
    )
    return items


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    items: Tensor,
    output: Tensor,
    scale: float,
    sliding_window: int | None,
    shape: DecodeShape,
    soft_cap: float | None = None,
) -> None:
    """Attention of query [R, H, D] (rows may be strided) into output [R, H, D]: row r over seq_lens[r] keys.

    `items` come from plan_decode with the same lengths, window and shape. A row of length 0 gives zeros.
    """
    num_rows, num_heads, head_dim = query.shape
    _, num_layers, _, num_kv_heads, block_size, width = kv_cache.shape
    group = num_heads // num_kv_heads
    layer_stride = 2 * num_kv_heads * block_size * width
    dim_pad = next_power_of_2(head_dim)
    partials = torch.empty((num_rows, num_heads, MAX_SPLITS, head_dim), dtype=torch.float32, device=query.device)
    partial_logs = torch.empty((num_rows, num_heads, MAX_SPLITS), dtype=torch.float32, device=query.device)
    num_programs = min(num_rows * MAX_SPLITS, max(1, MAX_PROGRAMS // num_kv_heads))
    decode_kernel[(num_programs, num_kv_heads)](
        query,
        *kernel_views(kv_cache),
        block_tables,
        seq_lens,
        items,
        output,
        partials,
        partial_logs,
        scale * LOG2_E,
        (soft_cap or 0.0) * LOG2_E,
        sliding_window or 0,
        layer * layer_stride,
        num_layers * layer_stride,
        query.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        TILE=shape.tile,
        MIN_TILES=shape.min_tiles,
        NUM_SPLITS=MAX_SPLITS,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=soft_cap is not None,
        IS_FP8=is_fp8(kv_cache),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    merge_kernel[(num_rows, num_heads)](
        partials,
        partial_logs,
        seq_lens,
        output,
        sliding_window or 0,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        TILE=shape.tile,
        MIN_TILES=shape.min_tiles,
        NUM_SPLITS=MAX_SPLITS,
        HAS_WINDOW=sliding_window is not None,
        num_warps=2,
    )
