"""QuantizedWeight: an int8, fp8 or int4 matrix with scales per group of inputs; quantize, concatenate, dequantize.

fp8 is e4m3 of OCP's FP8 specification; int4 is unsigned. Knows no file format; see
`workers/weights/quantized_weights.py`.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from . import four_bits
from .four_bits import ZERO_STEPS
from .stored_rows import StoredRows

E4M3_MAX = 448.0
INT8_MAX = 127.0
STORED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SLICE_ROWS = 128  # rows that are rounded at a time on a CPU: temporaries of whole matrices cost more time than rounding
Kind: TypeAlias = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix with weight[o, i] = (qweight[o, i] - zeros[o, g] / ZERO_STEPS) * scales[o, g] - mins[o, g], where g is
    the group of input i.

    qweight: [out, in] int8 or float8_e4m3fn. int4 is [out, in / 2] uint8: byte b holds input b in its low half and
    input in / 2 + b in its high half.
    """

    qweight: Tensor
    scales: Tensor  # [out, num_groups], floating
    zeros: Tensor | None  # [out, num_groups] uint8, in steps of 1 / ZERO_STEPS of a code; int4 only
    group_size: int  # without `g_idx`, input i is in group i // group_size
    g_idx: Tensor | None  # [in] int32: group of each input, if groups are not contiguous
    dtype: torch.dtype  # dtype of the dequantized matrix and of products with it
    mins: Tensor | None = None  # [out, num_groups] float32; int4 only, used instead of zeros
    levels: tuple[int, ...] | None = None  # the int8 values of the 16 int4 codes; zeros and mins are then None

    @property
    def is_packed(self) -> bool:
        """Whether a byte of qweight holds two inputs (int4)."""
        return self.qweight.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (out, in) of the dequantized matrix."""
        return self.qweight.shape[0], self.qweight.shape[1] * (2 if self.is_packed else 1)

    @property
    def nbytes(self) -> int:
        parts = (self.qweight, self.scales, self.zeros, self.mins, self.g_idx)
        return sum(each.nbytes for each in parts if each is not None)

    def input_groups(self) -> Tensor:
        """Return the group of each input: [in] int64."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.shape[1], device=self.qweight.device) // self.group_size

    def select_outputs(self, outputs: Tensor) -> QuantizedWeight:
        """Return the matrix with only the given outputs, in the given order. outputs: [n] int64."""
        stored = self.qweight.view(torch.uint8)[outputs].view(self.qweight.dtype)  # torch cannot index every e4m3
        zeros, mins = (None if each is None else each[outputs] for each in (self.zeros, self.mins))
        return replace(self, qweight=stored, scales=self.scales[outputs], zeros=zeros, mins=mins)

    def dequantize(self) -> Tensor:
        """Compute the matrix [out, in] in float32 and round it to `dtype`."""
        g_idx = self.input_groups()
        stored = unpack_halves(self.qweight) if self.is_packed else self.qweight
        if self.levels is not None:
            stored = torch.tensor(self.levels, device=stored.device)[stored.int()]
        qweight = stored.float()
        if self.zeros is not None:
            qweight -= self.zeros.float()[:, g_idx] / ZERO_STEPS
        qweight *= self.scales.float()[:, g_idx]
        if self.mins is not None:
            qweight -= self.mins[:, g_idx]
        return qweight.to(self.dtype)


Weight: TypeAlias = Tensor | QuantizedWeight | StoredRows  # [out, in]


def as_floats(weight: Weight) -> Tensor:
    """Return a weight as a plain matrix, dequantized if need be."""
    if isinstance(weight, StoredRows):
        return weight.read_floats()
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def quantize(
    weight: Tensor,
    kind: Kind,
    dtype: torch.dtype | None = None,
    group_size: int | None = None,
) -> QuantizedWeight:
    """Quantize weight [out, in].

    int8, fp8: one scale per `group_size` inputs (None: per output), from their largest magnitude. int4: a scale and a
    zero per four_bits.GROUP inputs, fitted to them (see four_bits.py); a weight for which `has_four_bits` is False
    becomes int8 instead. `dtype`: see QuantizedWeight; None: that of the weight. The error of an element x is at most
    scale / 2 (int8) or max(abs(x) / 16, scale / 1024) (e4m3).
    """
    if kind == "int4":
        if has_four_bits(weight):
            return _quantize_int4(weight, dtype or weight.dtype)
        kind = "int8"
    num_out, num_in = weight.shape
    size = num_in if group_size is None else group_size
    qweight = torch.empty((num_out, num_in), dtype=STORED_DTYPES[kind], device=weight.device)
    scales = torch.empty((num_out, num_in // size), device=weight.device)
    step = SLICE_ROWS if weight.device.type == "cpu" else max(num_out, 1)
    for first in range(0, num_out, step):
        rows = slice(first, first + step)
        codes, scales[rows] = _quantize_rows(weight[rows].float(), kind, size)
        qweight.view(torch.uint8)[rows] = codes.view(torch.uint8)  # torch copies e4m3 one by one
    return QuantizedWeight(qweight, scales, None, size, None, dtype or weight.dtype)


def _quantize_rows(rows: Tensor, kind: Kind, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the codes, [rows, in], and scales, [rows, groups], of rows in float32."""
    largest = INT8_MAX if kind == "int8" else E4M3_MAX
    groups = rows.unflatten(1, (-1, group_size))
    scales = (groups.abs().amax(dim=2) / largest).clamp(min=1e-12)
    scaled = groups.div(scales[..., None]).clamp_(-largest, largest).flatten(1)
    if kind == "int8":
        scaled.round_()
    return scaled.to(STORED_DTYPES[kind]), scales


def fp8_as_int8(weight: QuantizedWeight, group_size: int) -> QuantizedWeight:
    """Round an fp8 weight [out, in] to int8, with a scale for each `group_size` inputs, which divides all inputs. An
    element moves by at most 1/254 of the largest of its group."""
    exact, parts = replace(weight, dtype=torch.float32), list[QuantizedWeight]()
    for first in range(0, weight.shape[0], SLICE_ROWS):
        rows = torch.arange(first, min(first + SLICE_ROWS, weight.shape[0]), device=weight.qweight.device)
        parts.append(quantize(exact.select_outputs(rows).dequantize(), "int8", weight.dtype, group_size))
    return concatenate(parts)


def has_four_bits(weight: Tensor) -> bool:
    """Whether int4 can hold a weight [out, in]: both halves of its inputs are whole groups."""
    return weight.shape[1] % (2 * four_bits.GROUP) == 0


def new_int4(weight: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Return an int4 weight of the same shape [out, in], on the same device, that is not filled in yet."""
    num_out, num_in = weight.shape
    num_groups = num_in // four_bits.GROUP
    codes = weight.new_empty((num_out, num_in // 2), dtype=torch.uint8)
    scales = weight.new_empty((num_out, num_groups), dtype=torch.float32)
    zeros = weight.new_empty((num_out, num_groups), dtype=torch.uint8)
    return QuantizedWeight(codes, scales, zeros, four_bits.GROUP, None, dtype)


def _quantize_int4(weight: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    found = new_int4(weight, dtype)
    assert found.zeros is not None
    for rows, codes, scales, zeros in four_bits.fitted_slices(weight):
        found.qweight[rows] = pack_halves(codes)
        found.scales[rows] = scales
        found.zeros[rows] = zeros
    return found


def from_g_idx(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor, dtype: torch.dtype
) -> QuantizedWeight:
    """Build a weight from unpacked numbers [out, in] and g_idx [in] on the host; drop groups that no input uses.
    `zeros`, whole codes from 0 to 31, are given if it is int4."""
    used, g_idx = g_idx.unique(return_inverse=True)
    columns = used.to(scales.device)
    scales, zeros = scales[:, columns].contiguous(), None if zeros is None else zeros[:, columns] * ZERO_STEPS
    num_inputs, group_size = qweight.shape[1], int((g_idx == 0).sum())
    is_run = torch.equal(g_idx, torch.arange(num_inputs) // group_size)
    qweight = pack_halves(qweight) if zeros is not None else qweight.contiguous()
    kept = None if is_run else g_idx.to(qweight.device, torch.int32)
    return QuantizedWeight(qweight, scales, zeros, group_size, kept, dtype)


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate matrices along the outputs; if their groups differ, the intersections become the new groups. All must
    have the same levels; if one has mins, all must have mins and equal groups."""
    first = weights[0]
    if len(weights) == 1:
        return first
    stored = [weight.qweight.view(torch.uint8) for weight in weights]  # torch cannot concatenate e4m3 on every device
    qweight = torch.cat(stored).view(first.qweight.dtype)
    if all(weight.g_idx is None and weight.group_size == first.group_size for weight in weights):
        scales, g_idx = [weight.scales for weight in weights], first.g_idx
        zeros = [weight.zeros for weight in weights]
    else:
        combinations = torch.stack([weight.input_groups() for weight in weights])
        combinations, inverse = combinations.unique(dim=1, return_inverse=True)
        chosen = list(zip(weights, combinations, strict=True))
        scales, g_idx = [weight.scales[:, columns] for weight, columns in chosen], inverse.to(torch.int32)
        zeros = [None if weight.zeros is None else weight.zeros[:, columns] for weight, columns in chosen]
    present = [each for each in zeros if each is not None]
    joint = torch.cat(present) if present else None
    mins = torch.cat([weight.mins for weight in weights if weight.mins is not None]) if first.mins is not None else None
    assert all(weight.levels == first.levels for weight in weights)
    return QuantizedWeight(qweight, torch.cat(scales), joint, first.group_size, g_idx, first.dtype, mins, first.levels)


def pack_halves(qweight: Tensor) -> Tensor:
    """Pack numbers [out, in] below 16 into [out, in / 2] uint8, the second half of the inputs in the high bits."""
    low, high = qweight.to(torch.uint8).chunk(2, dim=1)
    return low | high << 4


def unpack_halves(packed: Tensor) -> Tensor:
    """Undo `pack_halves`: [out, in / 2] uint8 → [out, in] uint8."""
    return torch.cat((packed & 15, packed >> 4), dim=1)
