"""Matrix products with int8, fp8 or int4 weights, and with one matrix per expert; dequantizes inside the kernel.

A program computes a tile [BLOCK_N outputs, BLOCK_M rows]. The weight is the left operand: it is dequantized in
registers, and outputs fill the 64 rows of a wgmma even if there are few tokens. One program adds up all inputs of an
output, tile by tile in order; tiles may have another shape for another number of rows, except if batch-invariant.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import Activation
from ...four_bits import ZERO_STEPS
from ...quantized import QuantizedWeight, Weight, as_floats

KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "int4"}
STEP = tl.constexpr(1 / ZERO_STEPS)  # of a zero, in codes
MIN_BLOCK_K = 16  # the smallest dimension that tl.dot supports
BATCH_INVARIANT_ROWS = 64  # the batch size that selects the tile shape of batch-invariant products


@dataclass(frozen=True, eq=False)
class Matrices:
    """E stacked matrices [out, in] of one shape and kind; see QuantizedWeight."""

    qweight: Tensor  # [E, out, in]; int4: [E, out, in / 2]; float: in the model's dtype
    kind: str  # int8, fp8, int4 or float
    scales: Tensor | None  # [E, out, num_groups]
    zeros: Tensor | None  # [E, out, num_groups] uint8, in steps
    g_idx: Tensor | None  # [E, in] int32; None: input i is in group i // group_size
    group_size: int
    in_features: int
    dtype: torch.dtype  # the model's dtype

    @property
    def out_features(self) -> int:
        return self.qweight.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.qweight, self.scales, self.zeros, self.g_idx) if t is not None)

    @classmethod
    def pack(cls, weights: Sequence[Weight]) -> Matrices:
        """Stack weights of one shape and kind.

        The result has a g_idx if a weight has one, if group sizes differ, or if a tile of inputs would hold numbers of
        several groups.
        """
        first = weights[0]
        if not isinstance(first, QuantizedWeight):
            plain = torch.stack([as_floats(weight) for weight in weights])
            return cls(plain, "float", None, None, None, plain.shape[2], plain.shape[2], plain.dtype)
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        qweight = torch.stack([weight.qweight.view(torch.uint8) for weight in quantized])
        kind = KINDS[first.qweight.dtype]
        if kind == "int8":
            qweight = qweight.view(torch.int8)
        is_even = all(weight.g_idx is None and weight.group_size == first.group_size for weight in quantized)
        g_idx = None
        if not is_even or not _fits_tiles(first):
            g_idx = torch.stack([weight.input_groups() for weight in quantized]).to(torch.int32)
        num_groups = max(weight.scales.shape[1] for weight in quantized)
        scales = torch.stack([_widened(weight.scales, num_groups) for weight in quantized])
        zeros = None
        if first.zeros is not None:
            zeros = torch.stack([_widened(w.zeros, num_groups) for w in quantized if w.zeros is not None])
        return cls(qweight, kind, scales, zeros, g_idx, first.group_size, first.shape[1], first.dtype)


@dataclass(frozen=True, eq=False)
class QuantizedLinear:
    """Linear layer with a quantized matrix and a bias [out]."""

    matrices: Matrices
    bias: Tensor | None
    activation: Activation

    @property
    def in_features(self) -> int:
        return self.matrices.in_features

    @property
    def out_features(self) -> int:
        return self.matrices.out_features // (2 if self.activation.is_gated else 1)

    @property
    def nbytes(self) -> int:
        return self.matrices.nbytes + (0 if self.bias is None else self.bias.nbytes)


def _block_k(element_size: int, group_size: int, num_groups: int) -> int:
    """Choose the number of inputs of a tile: 64, or 32 for float32. If there are several groups, it is halved, down to
    MIN_BLOCK_K, until a group is a whole number of tiles; no tile fits if the group size is not a multiple of
    MIN_BLOCK_K. An iteration of int4 takes two tiles, one from each half of the inputs."""
    block = 32 if element_size == 4 else 64
    while num_groups > 1 and block > MIN_BLOCK_K and group_size % block:
        block //= 2
    return block


def _fits_tiles(weight: QuantizedWeight) -> bool:
    """Whether every tile of inputs is within one group; the second half of int4 inputs starts a new tile."""
    num_groups = weight.scales.shape[1]
    block = _block_k(weight.dtype.itemsize, weight.group_size, num_groups)
    has_fit = weight.group_size % block == 0 and (not weight.is_packed or weight.qweight.shape[1] % block == 0)
    return num_groups == 1 or has_fit


def _widened(values: Tensor, num_groups: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, num_groups - values.shape[1]))


@triton.jit
def _floats_of(qweight, dtype: tl.constexpr, KIND: tl.constexpr):
    """Convert quantized numbers to floats; an e4m3 number becomes 1/256 of its value, which `_scale_of` corrects."""
    if KIND == "fp8":
        bits = qweight.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # float16's exponent bias is larger by 8
        return half.to(tl.float16, bitcast=True).to(dtype)
    return qweight.to(dtype)


@triton.jit
def _scale_of(scales, KIND: tl.constexpr):
    wide = scales.to(tl.float32)
    if KIND == "fp8":
        wide *= 256.0
    return wide


@triton.jit
def _zeros_of(steps, dtype: tl.constexpr):
    """Convert zeros to codes. No dtype rounds them, nor a code minus one."""
    return steps.to(dtype) * STEP


@triton.jit
def _add_product(
    total, qweight, x_at, scales_at, zeros_at, g_idx_at, inputs, first, is_input, is_row, is_out,
    NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr, IS_GATHERED: tl.constexpr,
):  # fmt: skip
    """Return total [N, M] plus the product of qweight [N, K] and the rows at x_at [M], over the inputs `inputs` [K],
    which start at `first`."""
    values = tl.load(x_at[None, :] + inputs[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
    weight = _floats_of(qweight, values.dtype, KIND)
    if IS_GATHERED:
        g_idx = tl.load(g_idx_at + inputs, mask=is_input, other=0)
        where = is_out[:, None] & is_input[None, :]
        if HAS_ZEROS:
            weight -= _zeros_of(tl.load(zeros_at[:, None] + g_idx[None, :], mask=where, other=0), values.dtype)
        scale = _scale_of(tl.load(scales_at[:, None] + g_idx[None, :], mask=where, other=0.0), KIND)
        return tl.dot((weight.to(tl.float32) * scale).to(values.dtype), values, total, input_precision="ieee")
    if NUM_GROUPS == 1 and not HAS_ZEROS:  # the caller applies the scale to the sum
        return tl.dot(weight, values, total, input_precision="ieee")
    group = first // GROUP_SIZE
    if HAS_ZEROS:
        weight -= _zeros_of(tl.load(zeros_at + group, mask=is_out, other=0), values.dtype)[:, None]
    scale = _scale_of(tl.load(scales_at + group, mask=is_out, other=0.0), KIND)
    return total + tl.dot(weight, values, input_precision="ieee") * scale[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    x,  # [*, IN], rows x_stride apart
    qweight,
    scales,
    zeros,
    g_idx,
    bias,  # [E, OUT]
    output,  # [*, OUT]
    rows,  # [E, num_rows] int32: the output rows of each expert
    counts,  # [E] int32: number of them
    row_scales,  # float32, one per output row
    num_rows,
    x_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,  # output rows per row of x
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_GATHERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    WIDTH: tl.constexpr = IN // 2 if KIND == "int4" else IN
    expert = tl.program_id(2).to(tl.int64)
    places = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    limit = num_rows
    if HAS_EXPERTS:
        limit = tl.load(counts + expert)
        if tl.program_id(1) * BLOCK_M >= limit:
            return
    is_row = places < limit
    targets = places.to(tl.int64)
    if HAS_EXPERTS:
        targets = tl.load(rows + expert * num_rows + places, mask=is_row, other=0).to(tl.int64)
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_out = outs < OUT
    matrix_rows = expert * OUT + outs
    qweight_at = qweight + matrix_rows * WIDTH
    scales_at, zeros_at = scales + matrix_rows * NUM_GROUPS, zeros + matrix_rows * NUM_GROUPS
    g_idx_at = g_idx + expert * IN
    x_at = x + (targets // TOP_K) * x_stride
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < WIDTH
        loaded = tl.load(qweight_at[:, None] + inputs[None, :], mask=is_out[:, None] & is_input[None, :], other=0)
        if KIND == "int4":
            total = _add_product(
                total, loaded & 15, x_at, scales_at, zeros_at, g_idx_at, inputs, start, is_input, is_row, is_out,
                NUM_GROUPS, GROUP_SIZE, KIND, HAS_ZEROS, IS_GATHERED,
            )  # fmt: skip
            total = _add_product(
                total, loaded >> 4, x_at, scales_at, zeros_at, g_idx_at, inputs + WIDTH, start + WIDTH, is_input,
                is_row, is_out, NUM_GROUPS, GROUP_SIZE, KIND, HAS_ZEROS, IS_GATHERED,
            )  # fmt: skip
        else:
            total = _add_product(
                total, loaded, x_at, scales_at, zeros_at, g_idx_at, inputs, start, is_input, is_row, is_out,
                NUM_GROUPS, GROUP_SIZE, KIND, HAS_ZEROS, IS_GATHERED,
            )  # fmt: skip
    if KIND != "float" and NUM_GROUPS == 1 and not HAS_ZEROS and not IS_GATHERED:
        total *= _scale_of(tl.load(scales_at, mask=is_out, other=0.0), KIND)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + matrix_rows, mask=is_out, other=0.0).to(tl.float32)[:, None]
    if IS_WEIGHTED:
        total *= tl.load(row_scales + targets, mask=is_row, other=0.0)[None, :]
    at = output + targets[None, :] * OUT + outs[:, None]
    tl.store(at, total.to(output.dtype.element_ty), mask=is_out[:, None] & is_row[None, :])


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The (token, expert) pairs by expert; pair p belongs to token p // top_k and is row p of the output."""

    rows: Tensor  # [E, num_tokens] int32: the pairs of each expert in order, then unused entries
    counts: Tensor  # [E] int32: number of pairs of each expert
    num_pairs: int


@dataclass(frozen=True)
class MatmulShape:
    """Tile and launch parameters of a program."""

    block_m: int  # rows
    block_n: int  # outputs
    block_k: int  # inputs of a tile; an iteration takes one tile, for int4 two
    num_warps: int
    num_stages: int


def matmul_shape(num_rows: int, element_size: int, group_size: int, num_groups: int) -> MatmulShape:
    """Choose a tile's rows and outputs by `num_rows` (with experts: the average per expert), its inputs by `_block_k`.

    element_size: bytes of an element of the rows.
    """
    block_m = 16 if num_rows <= 16 else 32 if num_rows <= 48 else 64
    block_n, num_warps = (64, 4) if block_m <= 32 else (128, 8)
    block_k = _block_k(element_size, group_size, num_groups)
    return MatmulShape(block_m, block_n, block_k, num_warps, num_stages=4)


def matmul(
    x: Tensor,
    matrices: Matrices,
    bias: Tensor | None,
    dtype: torch.dtype,
    experts: ExpertRows | None = None,
    row_scales: Tensor | None = None,
    is_batch_invariant: bool = False,
) -> Tensor:
    """Multiply x [T, in] by the only matrix, or each (token, expert) pair by its expert's matrix.

    Returns [T or num_pairs, out] in `dtype`: the product plus the bias [E, out], each row multiplied by its
    `row_scales`. The rows of x are dense; with experts x has one row per token, or one per pair. `is_batch_invariant`:
    the bits of a row do not depend on the other rows.
    """
    num_rows, width = x.shape[0], matrices.out_features
    num_targets = num_rows if experts is None else experts.num_pairs
    output = torch.empty((num_targets, width), dtype=dtype, device=x.device)
    if not num_targets:
        return output
    num_matrices, num_groups = matrices.qweight.shape[0], 1 if matrices.scales is None else matrices.scales.shape[2]
    region = num_rows if experts is None else experts.rows.shape[1]
    rows_each = BATCH_INVARIANT_ROWS if is_batch_invariant else -(-num_targets // num_matrices)
    shape = matmul_shape(rows_each, x.element_size(), matrices.group_size, num_groups)
    grid = (triton.cdiv(width, shape.block_n), triton.cdiv(region, shape.block_m), num_matrices)
    matmul_kernel[grid](
        x,
        matrices.qweight,
        x if matrices.scales is None else matrices.scales,
        x if matrices.zeros is None else matrices.zeros,
        x if matrices.g_idx is None else matrices.g_idx,
        x if bias is None else bias,
        output,
        x if experts is None else experts.rows,
        x if experts is None else experts.counts,
        x if row_scales is None else row_scales,
        region,
        x.stride(0),
        IN=matrices.in_features,
        OUT=width,
        NUM_GROUPS=num_groups,
        GROUP_SIZE=matrices.group_size,
        TOP_K=num_targets // num_rows,
        KIND=matrices.kind,
        HAS_ZEROS=matrices.zeros is not None,
        IS_GATHERED=matrices.g_idx is not None,
        HAS_BIAS=bias is not None,
        HAS_EXPERTS=experts is not None,
        IS_WEIGHTED=row_scales is not None,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return output
