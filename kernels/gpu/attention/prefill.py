"""Prefill attention of rows with any number of query tokens over the paged cache, causal or up to `see_until`.

A program takes BLOCK_M query rows: tokens of one request times the query heads of one KV head; for 16-bit elements on
sm_90 at least 64, so that it uses wgmma. It processes the request's keys in three loops: masked at the start of the
window, unmasked, and masked along the diagonal; a batch-invariant one masks all in a single loop. All keys come from
the cache.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import AttentionMetadata, AttentionSpec
from ..launch import next_power_of_2
from ..table import PrefillShape
from .attention import attend_tile, bias_pointers, mean_value, no_keys, num_distances, score_arguments
from .cache import cache_arguments, largest_number, tile_bases


@triton.jit(do_not_specialize=["table_stride"])  # changes with the step
def prefill_kernel(
    query,  # [T, H, D], tokens query_stride apart
    kv_cache,
    scales,  # a cache of bytes as float32
    layer_offset,
    block_stride,
    block_tables,
    seq_lens,
    query_starts,
    tiles,  # [n, 2] int32: row, index of the tile's first token among the row's tokens of this step
    sinks,  # [H] float32
    bias,  # [H, NUM_DISTANCES] float32, see AttentionSpec
    see_until,  # [T] int32
    output,  # [T, H, D] contiguous
    scale,
    cap,
    window,
    query_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    NUM_DISTANCES: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_BATCH_INVARIANT: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP  # tokens of a tile; query rows past TOKENS * GROUP are idle
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.program_id(0) // NUM_KV_HEADS
    row = tl.load(tiles + 2 * tile).to(tl.int64)
    first = tl.load(tiles + 2 * tile + 1)
    query_start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - query_start
    offset = tl.load(seq_lens + row) - count  # position of the row's first token of this step
    lanes = tl.arange(0, BLOCK_M)
    tokens = first + lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    dims = tl.arange(0, DIM_PAD)
    is_query = (lanes < TOKENS * GROUP) & (tokens < count)
    exists = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    global_tokens = (query_start + tokens).to(tl.int64)
    rows = global_tokens * query_stride + heads * HEAD_DIM
    q = tl.load(query + rows[:, None] + dims[None, :], mask=exists, other=0.0)
    positions = offset + tokens
    last = offset + tl.minimum(first + TOKENS, count) - 1  # position of the tile's last token
    end = last + 1
    limits = positions
    if HAS_SPANS:
        limits = tl.load(see_until + global_tokens, mask=is_query, other=0)
        end = tl.maximum(end, tl.max(limits, axis=0) + 1)
    keys_base, values_base, scale_bases = tile_bases(
        kv_cache, scales, layer_offset, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, LARGEST
    )
    bias_rows = bias_pointers(bias, heads, tl.where(is_query, positions, 0), NUM_DISTANCES)
    table = block_tables + row * table_stride
    acc, m_i, l_i = no_keys(sinks, heads, lanes < TOKENS * GROUP, BLOCK_M, DIM_PAD, HAS_SINKS)
    diagonal = (offset + first + 1) // TILE * TILE  # every token attends to all earlier keys that are in its window
    body_start = first * 0
    begin = body_start
    if HAS_WINDOW:
        begin = tl.maximum(offset + first - window + 1, 0)
        left = begin // TILE * TILE
        body_start = left
        if not IS_BATCH_INVARIANT:
            body_start = tl.minimum((tl.maximum(last - window + 1, 0) + TILE - 1) // TILE * TILE, diagonal)
        for start in range(left, body_start, TILE):
            acc, m_i, l_i = attend_tile(
                q, positions, limits, bias_rows, acc, m_i, l_i, keys_base, values_base, scale_bases, table, start,
                begin, end, scale, cap, window, block_stride, BLOCK_SIZE, HEAD_DIM, DIM_PAD, TILE, True, HAS_WINDOW,
                HAS_SOFTCAP, NUM_DISTANCES > 0, LARGEST,
            )  # fmt: skip
    if IS_BATCH_INVARIANT:  # process all tiles in the last loop, as the limits between loops depend on other queries
        diagonal = body_start
    for start in range(body_start, diagonal, TILE):
        acc, m_i, l_i = attend_tile(
            q, positions, limits, bias_rows, acc, m_i, l_i, keys_base, values_base, scale_bases, table, start, begin,
            end, scale, cap, window, block_stride, BLOCK_SIZE, HEAD_DIM, DIM_PAD, TILE, False, HAS_WINDOW,
            HAS_SOFTCAP, NUM_DISTANCES > 0, LARGEST,
        )  # fmt: skip
    for start in range(diagonal, end, TILE):
        acc, m_i, l_i = attend_tile(
            q, positions, limits, bias_rows, acc, m_i, l_i, keys_base, values_base, scale_bases, table, start, begin,
            end, scale, cap, window, block_stride, BLOCK_SIZE, HEAD_DIM, DIM_PAD, TILE, True, HAS_WINDOW,
            HAS_SOFTCAP, NUM_DISTANCES > 0, LARGEST,
        )  # fmt: skip
    acc = mean_value(acc, l_i, LARGEST)
    at = global_tokens * (NUM_KV_HEADS * GROUP) + heads
    tl.store(output + at[:, None] * HEAD_DIM + dims[None, :], acc.to(output.dtype.element_ty), mask=exists)


def plan_prefill(metadata: AttentionMetadata, group: int, shape: PrefillShape) -> Tensor:
    """Cut the step's prefill rows into tiles of queries; return them, longest context first, as [n, 2] int32 on the
    step's device (see prefill_kernel)."""
    tokens = shape.block_m // group
    starts = metadata.query_starts_host
    tiles: list[tuple[int, int, int]] = []  # first position, row, first token
    for row in range(metadata.num_decode_rows, len(metadata.seq_lens_host)):
        offset = metadata.seq_lens_host[row] - starts[row + 1] + starts[row]
        tiles.extend((offset + first, row, first) for first in range(0, starts[row + 1] - starts[row], tokens))
    tiles.sort(key=lambda tile: -tile[0])
    device = metadata.seq_lens.device
    is_pinned = device.type == "cuda"  # a copy from pageable memory waits for the device
    host = torch.tensor([tile[1:] for tile in tiles], dtype=torch.int32, pin_memory=is_pinned).view(-1, 2)
    return host.to(device, non_blocking=True)


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    metadata: AttentionMetadata,
    tiles: Tensor,
    output: Tensor,
    spec: AttentionSpec,
    shape: PrefillShape,
    is_batch_invariant: bool = False,
) -> None:
    """Compute attention of the tokens in `tiles` (from plan_prefill). query, output: [T, H, D], all tokens of the step.

    `is_batch_invariant`: a token's bits do not depend on the other tokens of its tile.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    see_until = metadata.seen_through(spec.window)
    prefill_kernel[(num_kv_heads * tiles.shape[0],)](
        query,
        *cache_arguments(kv_cache, layer),
        metadata.block_tables,
        metadata.seq_lens,
        metadata.query_starts,
        tiles,
        query if spec.sinks is None else spec.sinks,
        query if spec.bias is None else spec.bias,
        metadata.seq_lens if see_until is None else see_until,
        output,
        *score_arguments(spec),
        spec.window or 0,
        query.stride(0),
        metadata.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=shape.block_m,
        TILE=shape.tile,
        HAS_WINDOW=spec.window is not None,
        HAS_SOFTCAP=spec.softcap != 0.0,
        HAS_SINKS=spec.sinks is not None,
        HAS_SPANS=see_until is not None,
        NUM_DISTANCES=num_distances(spec),
        LARGEST=largest_number(kv_cache),
        IS_BATCH_INVARIANT=is_batch_invariant,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
