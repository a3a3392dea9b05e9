"""The first launch of a step: token embeddings, and by `begin_decode` the attention metadata.

One program copies a part of one token's embedding. `begin_decode` has one more program per row, which derives position,
slot, length and block table from the row's state on the device, so that the host sends no lengths, and counts the token
as computed. Slots and block tables of further KV groups are written by a launch each.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import AttentionMetadata, BatchColumns, PackedLinear
from ..reference import plain_table

WIDTH_BLOCK = 1024  # elements of an embedding per program
TABLE_BLOCK = 256  # entries of a block table per iteration


@triton.jit
def copy_embedding(token, table, output, part, first_id, num_ids, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy part `part` of the token's embedding to output; zeros if the table does not contain the token."""
    columns = part * BLOCK + tl.arange(0, BLOCK)
    row = token - first_id
    rows = row + columns * 0
    is_ours = (columns < WIDTH) & (rows >= 0) & (rows < num_ids)
    tl.store(output + columns, tl.load(table + row * WIDTH + columns, mask=is_ours, other=0.0), mask=columns < WIDTH)


@triton.jit
def embed_tokens_kernel(
    token_ids,  # [T] int32 or int64
    last_tokens,  # [rows] int64: last_tokens[r] replaces token id −1 − r
    table,
    output,  # [T, WIDTH]
    first_id,
    num_ids,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + index).to(tl.int64)
    if HAS_ROWS:  # noqa: SIM102  (a constant of the compiler)
        if token < 0:
            token = tl.load(last_tokens + (-1 - token))
    copy_embedding(token, table, output + index * WIDTH, tl.program_id(1), first_id, num_ids, WIDTH, BLOCK)


@triton.jit
def place_token(position, source, slot, target, BLOCK_SIZE: tl.constexpr, TABLE_BLOCK: tl.constexpr):
    """Write the slot of a row's token at `position`, and copy the entries that the row uses from `source` to
    `target`."""
    block = tl.load(source + position // BLOCK_SIZE).to(tl.int64)
    tl.store(slot, block * BLOCK_SIZE + position % BLOCK_SIZE)
    num_blocks = position // BLOCK_SIZE + 1
    columns = tl.arange(0, TABLE_BLOCK)
    for start in range(0, num_blocks, TABLE_BLOCK):
        is_used = start + columns < num_blocks
        blocks = tl.load(source + start + columns, mask=is_used, other=0)
        tl.store(target + start + columns, blocks, mask=is_used)


@triton.jit(do_not_specialize=["row_tables"])  # a group's tables begin anywhere in those of all groups
def place_tokens_kernel(
    row_ids,  # [n] int64, −1 = padding
    seq_lens,  # [n] int32, with the step's token
    row_tables,  # [rows, row_table_stride] int32
    slots,  # [n] int64
    block_tables,  # [n, table_stride] int32
    row_table_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + index)
    if row < 0:
        tl.store(slots + index, -1)
    else:
        source = row_tables + row * row_table_stride
        target = block_tables + index * table_stride
        place_token(tl.load(seq_lens + index) - 1, source, slots + index, target, BLOCK_SIZE, TABLE_BLOCK)


@triton.jit
def begin_decode_kernel(
    row_ids,  # [n] int64, −1 = padding
    last_tokens,  # [rows] int64
    num_computed,  # [rows] int32; incremented for the rows in row_ids
    row_tables,  # [rows, row_table_stride] int32
    rope_deltas,  # [rows] int32
    table,
    output,  # [n, WIDTH]
    positions,  # [n] int64
    slots,  # [n] int64
    seq_lens,  # [n] int32
    block_tables,  # [n, table_stride] int32
    row_table_stride,
    table_stride,
    first_id,
    num_ids,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    HAS_DELTAS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) - 1
    row = tl.load(row_ids + index)
    if part >= 0:
        token = first_id - 1 + row * 0  # an id outside the table gives zeros
        if row >= 0:
            token = tl.load(last_tokens + row)
        copy_embedding(token, table, output + index * WIDTH, part, first_id, num_ids, WIDTH, BLOCK)
    elif row < 0:
        tl.store(positions + index, 0)
        tl.store(slots + index, -1)
        tl.store(seq_lens + index, 0)
    else:
        position = tl.load(num_computed + row)
        tl.debug_barrier()  # all threads read before any of them writes
        tl.store(num_computed + row, position + 1)
        place = position
        if HAS_DELTAS:
            place = position + tl.load(rope_deltas + row)
        tl.store(positions + index, place.to(tl.int64))
        tl.store(seq_lens + index, position + 1)
        source = row_tables + row * row_table_stride
        target = block_tables + index * table_stride
        place_token(position, source, slots + index, target, BLOCK_SIZE, TABLE_BLOCK)


def embed_tokens(token_ids: Tensor, last_tokens: Tensor | None, table: Tensor | PackedLinear, first_id: int) -> Tensor:
    """Compute Ops.embedding; with `last_tokens`, Ops.begin_step."""
    table = plain_table(table)
    num_ids, width = table.shape
    output = torch.empty((token_ids.shape[0], width), dtype=table.dtype, device=table.device)
    if token_ids.shape[0]:
        embed_tokens_kernel[(token_ids.shape[0], triton.cdiv(width, WIDTH_BLOCK))](
            token_ids,
            token_ids if last_tokens is None else last_tokens,
            table,
            output,
            first_id,
            num_ids,
            WIDTH=width,
            BLOCK=WIDTH_BLOCK,
            HAS_ROWS=last_tokens is not None,
            num_warps=4,
        )
    return output


def begin_decode(
    row_ids: Tensor,
    rows: BatchColumns,
    groups: Sequence[AttentionMetadata],
    block_size: int,
    table: Tensor | PackedLinear,
    first_id: int,
) -> Tensor:
    """Compute Ops.begin_decode."""
    metadata = groups[0]
    table = plain_table(table)
    num_ids, width = table.shape
    output = torch.empty((row_ids.shape[0], width), dtype=table.dtype, device=table.device)
    if row_ids.shape[0]:
        begin_decode_kernel[(row_ids.shape[0], 1 + triton.cdiv(width, WIDTH_BLOCK))](
            row_ids,
            rows.last_tokens,
            rows.num_computed,
            rows.block_tables[0],
            rows.num_computed if rows.rope_deltas is None else rows.rope_deltas,
            table,
            output,
            metadata.positions,
            metadata.slots,
            metadata.seq_lens,
            metadata.block_tables,
            rows.block_tables.stride(1),
            metadata.block_tables.stride(0),
            first_id,
            num_ids,
            WIDTH=width,
            BLOCK=WIDTH_BLOCK,
            BLOCK_SIZE=block_size,
            TABLE_BLOCK=TABLE_BLOCK,
            HAS_DELTAS=rows.rope_deltas is not None,
            num_warps=4,
        )
        for group, row_tables in zip(groups[1:], rows.block_tables[1:], strict=True):
            place_tokens_kernel[(row_ids.shape[0],)](
                row_ids,
                metadata.seq_lens,
                row_tables,
                group.slots,
                group.block_tables,
                row_tables.stride(0),
                group.block_tables.stride(0),
                BLOCK_SIZE=block_size,
                TABLE_BLOCK=TABLE_BLOCK,
                num_warps=4,
            )
    return output
