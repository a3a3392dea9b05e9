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

E4M3_MAX = 448.0
INT8_MAX = 127.0
INT4_MAX, INT4_GROUP = 15, 32  # largest code; number of inputs that share a scale


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix with weight[o, i] = (qweight[o, i] - zeros[o, g]) * scales[o, g] - mins[o, g], where g is the group of
    input i.

    qweight: [out, in] int8 or float8_e4m3fn. int4 is [out, in / 2] uint8: byte b holds input b in its low half and
    input in / 2 + b in its high half.
    """

    qweight: Tensor
    scales: Tensor  # [out, num_groups], floating
    zeros: Tensor | None  # [out, num_groups] uint8; int4 only
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
            qweight -= self.zeros.float()[:, g_idx]
        qweight *= self.scales.float()[:, g_idx]
        if self.mins is not None:
            qweight -= self.mins[:, g_idx]
        return qweight.to(self.dtype)


Weight: TypeAlias = Tensor | QuantizedWeight  # [out, in]


def as_floats(weight: Weight) -> Tensor:
    """Return a weight as a plain matrix, dequantized if need be."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def quantize(
    weight: Tensor,
    kind: Literal["int8", "int4", "fp8"],
    dtype: torch.dtype | None = None,
    group_size: int | None = None,
) -> QuantizedWeight:
    """Quantize weight [out, in].

    int8, fp8: one scale per `group_size` inputs (None: per output), from their largest magnitude. int4: a scale and a
    zero per INT4_GROUP inputs, from their smallest and largest value; a weight whose number of inputs is not a multiple
    of 2 * INT4_GROUP becomes int8 instead. `dtype`: see QuantizedWeight; None: that of the weight. The error of an
    element x is at most scale / 2 (int8), scale (int4), or max(abs(x) / 16, scale / 1024) (e4m3).
    """
    wide = weight.float()
    if kind == "int4":
        if weight.shape[1] % (2 * INT4_GROUP) == 0:
            return _quantize_int4(wide, dtype or weight.dtype)
        kind = "int8"
    largest = INT8_MAX if kind == "int8" else E4M3_MAX
    size = weight.shape[1] if group_size is None else group_size
    groups = wide.unflatten(1, (-1, size))
    scales = (groups.abs().amax(dim=2) / largest).clamp(min=1e-12)
    scaled = (groups / scales[..., None]).clamp(-largest, largest).flatten(1)
    qweight = scaled.round().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
    return QuantizedWeight(qweight, scales, None, size, None, dtype or weight.dtype)


def _quantize_int4(wide: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    groups = wide.unflatten(1, (-1, INT4_GROUP))
    least, largest = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)  # 0 has a code
    scales = ((largest - least) / INT4_MAX).clamp(min=2.0**-24).half().float()  # kernels may keep them in float16
    zeros = (-least / scales).round()
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, INT4_MAX)
    qweight = pack_halves(codes.flatten(1).to(torch.uint8))
    return QuantizedWeight(qweight, scales, zeros.to(torch.uint8), INT4_GROUP, None, dtype)


def from_g_idx(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor, dtype: torch.dtype
) -> QuantizedWeight:
    """Build a weight from unpacked numbers [out, in] (int4 if `zeros` is given) and g_idx [in] on the host; drop groups
    that no input uses."""
    used, g_idx = g_idx.unique(return_inverse=True)
    columns = used.to(scales.device)
    scales, zeros = scales[:, columns].contiguous(), None if zeros is None else zeros[:, columns].contiguous()
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
