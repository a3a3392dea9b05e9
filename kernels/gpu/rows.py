"""Updates of the row state on the device, scattered into its columns in one launch.

There are three lists, each with its own length: new num_computed values; new last tokens with sampling parameters,
adapter slots and position shifts; and new entries of the flattened block tables. Each program writes up to BLOCK
entries of every list.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["num_counted", "num_changed", "num_cells"])
def write_rows_kernel(
    counted_rows,  # [num_counted] int64
    counts,  # [num_counted] int32
    changed_rows,  # [num_changed] int64
    tokens,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,  # [num_changed, 2] int32
    cells,  # [num_cells] int64
    block_ids,  # [num_cells] int32
    slots,  # [num_changed] int32
    shifts,  # [num_changed] int32
    num_computed,  # the device's columns, from here to row_shifts
    last_tokens,
    row_temperatures,
    row_top_ks,
    row_top_ps,
    row_min_ps,
    row_seeds,
    block_tables,
    row_slots,
    row_shifts,
    num_counted,
    num_changed,
    num_cells,
    HAS_SLOTS: tl.constexpr,
    HAS_SHIFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_counted, is_changed, is_cell = entries < num_counted, entries < num_changed, entries < num_cells
    rows = tl.load(counted_rows + entries, mask=is_counted, other=0)
    tl.store(num_computed + rows, tl.load(counts + entries, mask=is_counted), mask=is_counted)
    rows = tl.load(changed_rows + entries, mask=is_changed, other=0)
    tl.store(last_tokens + rows, tl.load(tokens + entries, mask=is_changed), mask=is_changed)
    tl.store(row_temperatures + rows, tl.load(temperatures + entries, mask=is_changed), mask=is_changed)
    tl.store(row_top_ks + rows, tl.load(top_ks + entries, mask=is_changed), mask=is_changed)
    tl.store(row_top_ps + rows, tl.load(top_ps + entries, mask=is_changed), mask=is_changed)
    tl.store(row_min_ps + rows, tl.load(min_ps + entries, mask=is_changed), mask=is_changed)
    tl.store(row_seeds + 2 * rows, tl.load(seeds + 2 * entries, mask=is_changed), mask=is_changed)
    tl.store(row_seeds + 2 * rows + 1, tl.load(seeds + 2 * entries + 1, mask=is_changed), mask=is_changed)
    if HAS_SLOTS:
        tl.store(row_slots + rows, tl.load(slots + entries, mask=is_changed), mask=is_changed)
    if HAS_SHIFTS:
        tl.store(row_shifts + rows, tl.load(shifts + entries, mask=is_changed), mask=is_changed)
    places = tl.load(cells + entries, mask=is_cell, other=0)
    tl.store(block_tables + places, tl.load(block_ids + entries, mask=is_cell), mask=is_cell)


def write_rows(
    changes: Sequence[Tensor], columns: Sequence[Tensor], slots: Tensor | None = None, shifts: Tensor | None = None
) -> None:
    """Scatter the first 11 `changes` (the kernel's first arguments) into `columns`; no row or cell occurs twice. slots,
    shifts: the columns of adapter slots and of position shifts, if any; their changes come after those 11."""
    unused = changes[0]
    new_slots = unused if slots is None else changes[11]
    new_shifts = unused if shifts is None else changes[-1]
    lengths = [len(changes[i]) for i in (0, 2, 9)]
    if longest := max(lengths):
        write_rows_kernel[(triton.cdiv(longest, BLOCK),)](
            *changes[:11],
            new_slots,
            new_shifts,
            *columns,
            unused if slots is None else slots,
            unused if shifts is None else shifts,
            *lengths,
            HAS_SLOTS=slots is not None,
            HAS_SHIFTS=shifts is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
