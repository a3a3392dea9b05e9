"""The inputs of a decode step, made on the device from what it remembers of each row: no length leaves the host.

One program per entry of the padded batch. A row's next token stands at position num_computed; padding entries (row
−1) get length 0, which attention skips, and slot −1, which nothing writes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # entries of a block table copied at once


@triton.jit
def prepare_step_kernel(
    row_ids,  # [n] int64, -1 = padding
    last_tokens,  # [rows] int64
    num_computed,  # [rows] int64; each stepped row's grows by one
    row_tables,  # [rows, row_table_stride] int32
    token_ids,  # [n] int64
    positions,  # [n] int64
    next_positions,  # [n] int64: of the tokens that the step samples
    slots,  # [n] int64
    seq_lens,  # [n] int32
    block_tables,  # [n, table_stride] int32
    row_table_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + index)
    if row < 0:
        tl.store(token_ids + index, 0)
        tl.store(positions + index, 0)
        tl.store(next_positions + index, 0)
        tl.store(slots + index, -1)
        tl.store(seq_lens + index, 0)
    else:
        position = tl.load(num_computed + row)
        tl.debug_barrier()  # every thread has read it before one writes it
        tl.store(num_computed + row, position + 1)
        tl.store(token_ids + index, tl.load(last_tokens + row))
        tl.store(positions + index, position)
        tl.store(next_positions + index, position + 1)
        tl.store(seq_lens + index, (position + 1).to(tl.int32))
        source = row_tables + row * row_table_stride
        block = tl.load(source + position // BLOCK_SIZE).to(tl.int64)
        tl.store(slots + index, block * BLOCK_SIZE + position % BLOCK_SIZE)
        num_blocks = (position // BLOCK_SIZE + 1).to(tl.int32)
        columns = tl.arange(0, BLOCK)
        for start in range(0, num_blocks, BLOCK):
            is_used = start + columns < num_blocks
            blocks = tl.load(source + start + columns, mask=is_used, other=0)
            tl.store(block_tables + index * table_stride + start + columns, blocks, mask=is_used)


def prepare_step(
    row_ids: Tensor,
    last_tokens: Tensor,
    num_computed: Tensor,
    row_tables: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    next_positions: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> None:
    """Fill the step's inputs [n] for the rows of `row_ids` [n] and count their tokens as computed."""
    prepare_step_kernel[(row_ids.shape[0],)](
        row_ids,
        last_tokens,
        num_computed,
        row_tables,
        token_ids,
        positions,
        next_positions,
        slots,
        seq_lens,
        block_tables,
        row_tables.stride(0),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
