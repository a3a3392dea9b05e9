"""The second half of low-rank updates: y + B inner, followed by the layer's scale, bias and activation.

The base model's outputs y already include the bias; they are float32 if our kernels computed them, else torch has
rounded them. The activation is part of the launch, because most time goes into reading and writing the outputs. See
low_rank.py.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import NO_ACTIVATION, Activation
from ..activation import activated, gated
from .adapter_rows import ROWS, TILE_FIELDS, SlotTiles
from .low_rank import PAGE, PART_FIELDS, SLOT_FIELDS, LowRankMatrices, low_rank_shape


@triton.jit
def updated(
    base, bias, inner, b, info, scales, num_rows, matrix, is_changed, rows, is_row, first_out, is_out,
    OUT: tl.constexpr, MAX_RANKS: tl.constexpr, MAX_RANK: tl.constexpr, NUM_PARTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Compute scale * (W x + B inner) + bias for the outputs from `first_out` on: [OUTPUTS, ROWS] float32."""
    outs = first_out + tl.arange(0, OUTPUTS)
    exists = is_out[:, None] & is_row[None, :]
    result = tl.load(base + rows[None, :] * OUT + outs[:, None], mask=exists, other=0.0).to(tl.float32)
    if is_changed:
        fields = info + matrix * (SLOT_FIELDS + PART_FIELDS * NUM_PARTS)
        b_at = b + matrix * OUT * MAX_RANK + outs * tl.multiple_of(tl.load(fields), PAGE)
        change = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        for part in tl.static_range(NUM_PARTS):
            at = fields + SLOT_FIELDS + PART_FIELDS * part
            first, end = tl.load(at), tl.load(at + 1)
            first_rank, end_rank = tl.load(at + 2), tl.load(at + 3)
            is_ours = is_out & (outs >= first) & (outs < end)
            has_any = (first < first_out + OUTPUTS) & (end > first_out)
            for start in range(first_rank, tl.where(has_any, end_rank, first_rank), PAGE):
                ranks = start + tl.arange(0, PAGE)
                is_rank = ranks < end_rank
                values = tl.zeros((PAGE, ROWS), dtype=tl.float32)
                for split in tl.static_range(NUM_SPLITS):
                    values += tl.load(
                        inner + (split * num_rows + rows[None, :]) * MAX_RANKS + ranks[:, None],
                        mask=is_rank[:, None] & is_row[None, :],
                        other=0.0,
                    )
                columns = (ranks - first_rank)[None, :]
                weight = tl.load(b_at[:, None] + columns, mask=is_ours[:, None] & is_rank[None, :], other=0.0)
                change = tl.dot(weight.to(tl.float32), values, change, input_precision=PRECISION)
        result += change
        if tl.load(fields + 1) != 0:
            scale = tl.load(scales + matrix * OUT + outs, mask=is_out, other=0.0)[:, None]
            if HAS_BIAS:
                shift = tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)[:, None]
                result = (result - shift) * scale + shift
            else:
                result *= scale
    return result


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    base,  # [num_rows, OUT]; for a gated activation OUT = 2 WIDTH, gates first
    output,  # [num_rows, WIDTH]
    bias,  # [NUM_EXPERTS, OUT]
    inner,  # [NUM_SPLITS, num_rows, MAX_RANKS]
    b,  # [slots, NUM_EXPERTS, OUT * MAX_RANK]
    info,
    scales,
    row_scales,  # [num_rows] float32
    order,
    tiles,
    num_rows,
    limit,  # Activation.limit
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    IS_IN_PLACE: tl.constexpr,  # rows of slot 0 are complete already
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PAGE: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * TILE_FIELDS
    slot = tl.load(tile)
    if slot < 0:
        return
    if IS_IN_PLACE:  # noqa: SIM102  (a constant of the compiler)
        if slot == 0:
            return
    dtype: tl.constexpr = output.dtype.element_ty
    expert = tl.load(tile + 1)
    matrix = tl.maximum(slot - 1, 0).to(tl.int64) * NUM_EXPERTS + expert
    num_fields: tl.constexpr = SLOT_FIELDS + PART_FIELDS * NUM_PARTS
    is_changed = (slot > 0) & (tl.load(info + matrix * num_fields + num_fields - 1) > 0)
    places = tl.load(tile + 2) + tl.arange(0, ROWS)
    is_row = places < tl.load(tile + 3)
    rows = tl.load(order + places, mask=is_row, other=0).to(tl.int64)
    bias += expert * OUT
    first = tl.program_id(0) * OUTPUTS
    outs = first + tl.arange(0, OUTPUTS)
    is_out = outs < WIDTH
    result = updated(
        base, bias, inner, b, info, scales, num_rows, matrix, is_changed, rows, is_row, OUT - WIDTH + first, is_out,
        OUT, MAX_RANKS, MAX_RANK, NUM_PARTS, NUM_SPLITS, HAS_BIAS, PRECISION, ROWS, OUTPUTS, PAGE,
    )  # fmt: skip
    if OUT > WIDTH:
        gate = updated(
            base, bias, inner, b, info, scales, num_rows, matrix, is_changed, rows, is_row, first, is_out,
            OUT, MAX_RANKS, MAX_RANK, NUM_PARTS, NUM_SPLITS, HAS_BIAS, PRECISION, ROWS, OUTPUTS, PAGE,
        )  # fmt: skip
        gate, result = gate.to(dtype).to(tl.float32), result.to(dtype).to(tl.float32)
        result = gated(gate, result, limit, KIND, dtype)
    elif KIND != "none":
        result = activated(result.to(dtype).to(tl.float32), limit, KIND)
    if IS_WEIGHTED:
        result *= tl.load(row_scales + rows, mask=is_row, other=0.0)[None, :]
    at = output + rows[None, :] * WIDTH + outs[:, None]
    tl.store(at, result.to(dtype), mask=is_out[:, None] & is_row[None, :])


def expand(
    base: Tensor,
    inner: Tensor,
    matrices: LowRankMatrices,
    tiles: SlotTiles,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    activation: Activation = NO_ACTIVATION,
    row_scales: Tensor | None = None,
) -> Tensor:
    """Update the outputs `base` [rows, out] of a layer, apply the activation, and multiply each row by its
    `row_scales`: [rows, out or, if gated, out / 2] in `dtype`. The result may be `base` itself, overwritten.

    bias: [E, out], already contained in `base`. Rows of slot 0 get no update, only the activation and row_scales. The
    updated outputs are rounded to `dtype` before the activation.
    """
    num_rows, width = base.shape
    num_outputs = width // (2 if activation.is_gated else 1)
    has_shape = base.dtype == dtype and width == num_outputs
    output = base if has_shape else torch.empty((num_rows, num_outputs), dtype=dtype, device=base.device)
    shape = low_rank_shape(matrices.b.element_size())
    expand_kernel[(triton.cdiv(num_outputs, shape.outputs), tiles.tiles.shape[0])](
        base,
        output,
        base if bias is None else bias,
        inner,
        matrices.b,
        matrices.info,
        matrices.scales,
        base if row_scales is None else row_scales,
        tiles.order,
        tiles.tiles,
        num_rows,
        float(activation.limit),
        OUT=width,
        WIDTH=num_outputs,
        MAX_RANKS=inner.shape[2],
        MAX_RANK=matrices.b.shape[2] // width,
        NUM_PARTS=matrices.num_parts,
        NUM_SPLITS=inner.shape[0],
        NUM_EXPERTS=matrices.b.shape[1],
        HAS_BIAS=bias is not None,
        IS_WEIGHTED=row_scales is not None,
        IS_IN_PLACE=has_shape and row_scales is None and activation.kind == "none",
        KIND=activation.kind,
        PRECISION=shape.precision,
        ROWS=ROWS,
        OUTPUTS=shape.outputs,
        PAGE=PAGE,
        num_warps=4,
    )
    return output
