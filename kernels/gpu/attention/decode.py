"""Decode attention: one query token per row over the paged cache, with split-KV.

A program computes all query heads of a KV head, so that keys and values are read once. The number of splits, at most
MAX_SPLITS, depends only on the row's length. Once per step the device lists all (row, split) items, and a grid of fixed
size shares them out. So one CUDA graph serves all lengths, long rows use the whole GPU, and a row's bits do not depend
on other rows.

    seq_lens → plan_kernel → items → decode_kernel → output of rows with one split, else partials → merge_kernel
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import AttentionSpec
from ..launch import next_power_of_2
from ..table import DecodeShape, group_rows
from .attention import NO_SCORE, attend_tile, bias_pointers, mean_value, no_keys, num_distances, score_arguments
from .cache import cache_arguments, largest_number, tile_bases

MAX_SPLITS = 16  # splits of a row; bounds the memory for partial results
PLAN_ROWS = 256  # rows per iteration of plan_kernel
MAX_PROGRAMS = 2048  # per launch, for all KV heads: a few waves on any GPU; a program may take several items


@triton.jit
def split_tiles(
    length, window, TILE: tl.constexpr, MIN_TILES: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Return, elementwise over lengths: the first tile in the window, the number of tiles, and tiles per split."""
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0) // TILE
    num_tiles = (length + TILE - 1) // TILE - first
    return first, num_tiles, tl.maximum((num_tiles + NUM_SPLITS - 1) // NUM_SPLITS, MIN_TILES)


@triton.jit(do_not_specialize=["num_rows"])
def plan_kernel(
    seq_lens,  # [R]
    items,  # [1 + R * NUM_SPLITS] int32: the number of items, then row * NUM_SPLITS + split of each
    num_rows,
    window,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the items (row, split) of one row after those of the rows before it; the last row's program writes the
    number of all items."""
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
    query,  # [R, H, D], rows query_stride apart
    kv_cache,
    scales,  # a cache of bytes as float32
    layer_offset,
    block_stride,
    block_tables,  # [R, table_stride]
    seq_lens,
    items,
    sinks,  # [H] float32
    bias,  # [H, NUM_DISTANCES] float32, see AttentionSpec
    output,  # [R, H, D] contiguous
    partials,  # [R, H, NUM_SPLITS, D] float32
    partial_logs,  # [R, H, NUM_SPLITS] float32: log2 of the sum of 2^score
    scale,
    cap,
    window,
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
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_DISTANCES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    kv_head = tl.program_id(1)
    members = tl.arange(0, GROUP_PAD)
    heads = kv_head * GROUP + members
    dims = tl.arange(0, DIM_PAD)
    exists = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    keys_base, values_base, scale_bases = tile_bases(
        kv_cache, scales, layer_offset, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, LARGEST
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
        begin = tl.maximum(length - window, 0)
        q = tl.load(query + row * query_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=exists, other=0.0)
        positions = tl.full([GROUP_PAD], 0, tl.int32) + (length - 1)
        bias_rows = bias_pointers(bias, tl.where(members < GROUP, heads, 0), positions, NUM_DISTANCES)
        table = block_tables + row * table_stride
        # the first split has the sink: the merge weights it like keys
        has_sink = (members < GROUP) & (split == 0)
        acc, m_i, l_i = no_keys(sinks, heads, has_sink, GROUP_PAD, DIM_PAD, HAS_SINKS)
        # All tiles are masked: an extra masked tile outside the pipelined loop would wait for its own loads.
        for tile_start in range(start, stop, TILE):
            acc, m_i, l_i = attend_tile(
                q, positions, positions, bias_rows, acc, m_i, l_i, keys_base, values_base, scale_bases, table,
                tile_start, begin, length, scale, cap, window, block_stride, BLOCK_SIZE, HEAD_DIM, DIM_PAD, TILE, True,
                HAS_WINDOW, HAS_SOFTCAP, NUM_DISTANCES > 0, LARGEST,
            )  # fmt: skip
        acc = mean_value(acc, l_i, LARGEST)
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
    """Merge the splits of one (row, query head), if there are several; write zeros for a row of length 0."""
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
    """Return the (row, split) items of a step's decode rows for all layers with this window.

    seq_lens: [R] int32. Returns [1 + R * MAX_SPLITS] int32, see plan_kernel.
    """
    num_rows = seq_lens.shape[0]
    items = torch.empty(1 + num_rows * MAX_SPLITS, dtype=torch.int32, device=seq_lens.device)
    constants = _split_constants(sliding_window, shape)
    plan_kernel[(num_rows,)](seq_lens, items, num_rows, sliding_window or 0, **constants, ROWS=PLAN_ROWS, num_warps=4)
    return items


def _split_constants(sliding_window: int | None, shape: DecodeShape) -> dict[str, int]:
    """Return the constants of `split_tiles`, the same for all three kernels."""
    return {
        "TILE": shape.tile,
        "MIN_TILES": shape.min_tiles,
        "NUM_SPLITS": MAX_SPLITS,
        "HAS_WINDOW": sliding_window is not None,
    }


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    items: Tensor,
    output: Tensor,
    spec: AttentionSpec,
    shape: DecodeShape,
    max_programs: int = MAX_PROGRAMS,
) -> None:
    """Compute attention of query [R, H, D] (rows may be strided) over the first seq_lens[r] keys of each row r.

    `items` come from plan_decode with the same lengths, window and shape. output: [R, H, D], 0 for rows of length 0.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    group = num_heads // num_kv_heads
    constants = _split_constants(spec.window, shape)
    dim_pad = next_power_of_2(head_dim)
    partials = torch.empty((num_rows, num_heads, MAX_SPLITS, head_dim), dtype=torch.float32, device=query.device)
    partial_logs = torch.empty((num_rows, num_heads, MAX_SPLITS), dtype=torch.float32, device=query.device)
    num_programs = min(num_rows * MAX_SPLITS, max(1, max_programs // num_kv_heads))
    decode_kernel[(num_programs, num_kv_heads)](
        query,
        *cache_arguments(kv_cache, layer),
        block_tables,
        seq_lens,
        items,
        query if spec.sinks is None else spec.sinks,
        query if spec.bias is None else spec.bias,
        output,
        partials,
        partial_logs,
        *score_arguments(spec),
        spec.window or 0,
        query.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=group_rows(group),
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        **constants,
        HAS_SOFTCAP=spec.softcap != 0.0,
        HAS_SINKS=spec.sinks is not None,
        NUM_DISTANCES=num_distances(spec),
        LARGEST=largest_number(kv_cache),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    merge_kernel[(num_rows, num_heads)](
        partials,
        partial_logs,
        seq_lens,
        output,
        spec.window or 0,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        **constants,
        num_warps=2,
    )
