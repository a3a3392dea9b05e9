"""The first half of low-rank updates, inner = A x, for the rows of each slot; expand.py adds B inner.

A program multiplies a tile of rows by the matrix of their slot. All tiles have one shape and each sum has one order, so
that the bits of a row depend only on the row and its slot: inputs are split by their number alone, and the sums of the
splits are added in order (here or in expand.py). Loops end at the rank of the slot, which is read on the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .adapter_rows import ROWS, TILE_FIELDS, SlotTiles

PAGE = 16  # ranks per iteration of expand: the smallest inner dimension of tl.dot
PART_FIELDS = tl.constexpr(4)  # first output and end, first rank and end
SLOT_FIELDS = tl.constexpr(2)  # before the parts' fields: stride of B, whether there are scales
MAX_SPLITS = 8  # splits of the inputs, so that a few rows still use many multiprocessors
MIN_SPLIT = 256  # fewest inputs of a split
MAX_RANK_PROGRAMS = 4  # programs that share the ranks of a tile
MANY_ROWS = 1024  # with more rows, a program computes all splits of a tile, as there are enough tiles


@dataclass(frozen=True, eq=False)
class LowRankMatrices:
    """Updates of a layer, or of E experts, in each slot from 1 on. R: room for the ranks of all parts of an update."""

    a: Tensor  # [slots, E, R, in]: the parts' matrices one below the other; for an embedding [slots, 1, ids, R]
    b: Tensor  # [slots, E, out * max_rank], begins with [out, stride]; an output has the ranks of its part only
    info: Tensor  # [slots, E, SLOT_FIELDS + PART_FIELDS * parts] int32
    scales: Tensor  # [slots, E, out] float32
    num_parts: int  # the largest number of parts in an update

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + self.info.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class LowRankShape:
    """Tile and launch parameters of shrink and expand."""

    ranks: int  # ranks per iteration of shrink
    inputs: int
    outputs: int
    precision: str  # precision of tl.dot with the inner values, which are float32
    num_stages: int


def low_rank_shape(element_size: int) -> LowRankShape:
    """Choose the shape by the bytes of an element only, so that results do not depend on the number of rows."""
    if element_size > 2:  # no tensor cores
        return LowRankShape(32, 32, 32, "ieee", num_stages=2)
    return LowRankShape(64, 64, 64, "tf32x3", num_stages=4)


@triton.jit
def sum_split(x_at, a_at, first, last, is_row, is_rank, RANKS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr):
    """Sum the products of A and x over the inputs [first, last): [RANKS, ROWS]."""
    total = tl.zeros((RANKS, ROWS), dtype=tl.float32)
    for start in range(first, last, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        is_input = inputs < last
        weight = tl.load(a_at[:, None] + inputs[None, :], mask=is_rank[:, None] & is_input[None, :], other=0.0)
        values = tl.load(x_at[None, :] + inputs[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
        total = tl.dot(weight, values, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x,  # [*, IN], rows x_stride apart
    a,  # [slots, NUM_EXPERTS, MAX_RANKS, IN]
    info,
    order,
    tiles,
    inner,  # [programs of axis 1, num_rows, MAX_RANKS] float32
    num_rows,
    x_stride,
    IN: tl.constexpr,
    MAX_RANKS: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # parts of an update
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,  # rows per row of x
    SPLIT: tl.constexpr,  # inputs
    SPLITS_EACH: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    tile = tiles + tl.program_id(2) * TILE_FIELDS
    slot = tl.load(tile)
    if slot <= 0:
        return
    matrix = (slot - 1).to(tl.int64) * NUM_EXPERTS + tl.load(tile + 1)
    num_fields: tl.constexpr = SLOT_FIELDS + PART_FIELDS * NUM_PARTS
    num_ranks = tl.load(info + matrix * num_fields + num_fields - 1)
    places = tl.load(tile + 2) + tl.arange(0, ROWS)
    is_row = places < tl.load(tile + 3)
    rows = tl.load(order + places, mask=is_row, other=0).to(tl.int64)
    x_at = x + (rows // TOP_K) * x_stride
    for start in range(tl.program_id(0) * RANKS, num_ranks, tl.num_programs(0) * RANKS):
        ranks = start + tl.arange(0, RANKS)
        is_rank = ranks < num_ranks
        a_at = a + (matrix * MAX_RANKS + ranks) * IN
        total = tl.zeros((RANKS, ROWS), dtype=tl.float32)
        for i in range(SPLITS_EACH):
            first = (tl.program_id(1) * SPLITS_EACH + i) * SPLIT
            total += sum_split(x_at, a_at, first, tl.minimum(first + SPLIT, IN), is_row, is_rank, RANKS, ROWS, INPUTS)
        at = inner + (tl.program_id(1) * num_rows + rows[None, :]) * MAX_RANKS + ranks[:, None]
        tl.store(at, total, mask=is_rank[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["first_id", "num_ids"])
def look_up_kernel(
    token_ids,  # [T]; in decode steps row ids
    last_tokens,  # [rows] int64: last_tokens[r] replaces token id −1 − r
    slots,  # [T] int32
    a,  # [slots, num_ids, MAX_RANKS]
    info,  # that of one part
    inner,  # [T, MAX_RANKS] float32
    first_id,
    num_ids,
    MAX_RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    IS_DECODE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index).to(tl.int64) - 1
    if slot < 0:
        return
    token = tl.load(token_ids + index).to(tl.int64)
    if IS_DECODE:
        token = -1 - token
    if HAS_ROWS:  # noqa: SIM102  (a constant of the compiler)
        if token < 0:
            token = tl.load(last_tokens + (-1 - token))
    row = token - first_id
    ranks = tl.arange(0, RANKS_PAD)
    is_rank = ranks < tl.load(info + slot * (SLOT_FIELDS + PART_FIELDS) + SLOT_FIELDS + PART_FIELDS - 1)
    is_ours = is_rank & (ranks * 0 + row >= 0) & (ranks * 0 + row < num_ids)
    values = tl.load(a + (slot * num_ids + row) * MAX_RANKS + ranks, mask=is_ours, other=0.0)
    tl.store(inner + index * MAX_RANKS + ranks, values.to(tl.float32), mask=is_rank)


def split_inputs(num_inputs: int, block: int) -> int:
    """Return the number of inputs per split, a multiple of `block`: at least MIN_SPLIT, with at most MAX_SPLITS
    splits."""
    return -(-max(-(-num_inputs // MAX_SPLITS), MIN_SPLIT) // block) * block


def inner_like(x: Tensor, matrices: LowRankMatrices, tiles: SlotTiles, many_rows: int = MANY_ROWS) -> Tensor:
    """Allocate the result of `shrink`; it has one split if there are more than `many_rows` rows."""
    split = split_inputs(matrices.a.shape[3], low_rank_shape(x.element_size()).inputs)
    num_splits = 1 if tiles.num_rows > many_rows else triton.cdiv(matrices.a.shape[3], split)
    return torch.empty((num_splits, tiles.num_rows, matrices.a.shape[2]), dtype=torch.float32, device=x.device)


def shrink(x: Tensor, matrices: LowRankMatrices, tiles: SlotTiles, output: Tensor | None = None) -> Tensor:
    """Compute inner [n, rows, R] float32; its sum over the n splits, in order, is A x. Rows without an update are not
    written.

    x: one row per row of the tiles, or per token; rows may be strided. output: memory for the result, from
    `inner_like`.
    """
    *_, max_ranks, num_inputs = matrices.a.shape
    shape = low_rank_shape(x.element_size())
    split = split_inputs(num_inputs, shape.inputs)
    inner = inner_like(x, matrices, tiles) if output is None else output
    num_splits = inner.shape[0]
    rank_programs = min(triton.cdiv(max_ranks, shape.ranks), MAX_RANK_PROGRAMS)
    shrink_kernel[(rank_programs, num_splits, tiles.tiles.shape[0])](
        x,
        matrices.a,
        matrices.info,
        tiles.order,
        tiles.tiles,
        inner,
        tiles.num_rows,
        x.stride(0),
        IN=num_inputs,
        MAX_RANKS=max_ranks,
        NUM_PARTS=matrices.num_parts,
        NUM_EXPERTS=matrices.a.shape[1],
        TOP_K=tiles.num_rows // x.shape[0],
        SPLIT=split,
        SPLITS_EACH=triton.cdiv(num_inputs, split) // num_splits,
        ROWS=ROWS,
        RANKS=shape.ranks,
        INPUTS=shape.inputs,
        num_warps=4,
        num_stages=shape.num_stages,
    )
    return inner


def look_up(
    token_ids: Tensor,
    last_tokens: Tensor | None,
    slots: Tensor,
    matrices: LowRankMatrices,
    first_id: int,
    is_decode: bool,
) -> Tensor:
    """Look up the columns of an embedding's A for the tokens: inner [1, T, R], for `expand`. token_ids, last_tokens:
    those of `embed_tokens`; with `is_decode` token_ids are row ids, −1 = padding, whose slot must be 0."""
    _, _, num_ids, max_ranks = matrices.a.shape
    inner = torch.empty((1, len(token_ids), max_ranks), dtype=torch.float32, device=slots.device)
    look_up_kernel[(len(token_ids),)](
        token_ids,
        token_ids if last_tokens is None else last_tokens,
        slots,
        matrices.a,
        matrices.info,
        inner,
        first_id,
        num_ids,
        MAX_RANKS=max_ranks,
        RANKS_PAD=triton.next_power_of_2(max_ranks),
        HAS_ROWS=last_tokens is not None,
        IS_DECODE=is_decode,
        num_warps=1,
    )
    return inner
