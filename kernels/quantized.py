"""QuantizedWeight: a matrix in 8 or 4 bits with scales; what it means, how it is made and put together, in plain torch.

Codes are int8, e4m3 (float8 with 4 bits of exponent, OCP's FP8 specification) or unsigned integers of 4 bits. Knows no
file format; `workers/weights/quantized_weights.py` does.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

E4M3_MAX = 448.0
INT8_MAX = 127.0


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """weight[o, i] = (code[o, i] - zeros[o, g]) * scales[o, g], where g is the group of input i.

    qweight: [out, in] int8 or float8_e4m3fn; or of 4 bits each, [out, in / 2] uint8: the low half of byte b is the code
    of input b, its high half that of input in / 2 + b.
    """

    qweight: Tensor
    scales: Tensor  # [out, num_groups], floating
    zeros: Tensor | None  # [out, num_groups] uint8, of 4-bit qweight alone
    group_size: int  # without `g_idx`, the group of input i is i // group_size
    g_idx: Tensor | None  # [in] int32: the group of each input, where they do not follow each other
    dtype: torch.dtype  # what the products are computed in

    @property
    def is_packed(self) -> bool:
        """Two qweight to the byte."""
        return self.qweight.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.qweight.shape[0], self.qweight.shape[1] * (2 if self.is_packed else 1)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.qweight, self.scales, self.zeros, self.g_idx) if t is not None)

    def input_groups(self) -> Tensor:
        """[in] int64."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.shape[1], device=self.qweight.device) // self.group_size

    def dequantize(self) -> Tensor:
        """[out, in] as `dtype`, rounded once."""
        g_idx = self.input_groups()
        qweight = (unpack_halves(self.qweight) if self.is_packed else self.qweight).float()
        if self.zeros is not None:
            qweight -= self.zeros.float()[:, g_idx]
        return qweight.mul_(self.scales.float()[:, g_idx]).to(self.dtype)


Weight: TypeAlias = Tensor | QuantizedWeight  # [out, in]


def as_floats(weight: Weight) -> Tensor:
    """The matrix that a weight stands for."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def quantize(weight: Tensor, kind: Literal["int8", "fp8"]) -> QuantizedWeight:
    """Round weight [out, in] to 8 bits, with one scale for each output that takes its largest element to the end.

    An element moves by at most scale / 2 (int8), or by 1/16 of itself or scale / 1024, what is more (e4m3).
    """
    wide = weight.float()
    largest = INT8_MAX if kind == "int8" else E4M3_MAX
    scales = (wide.abs().amax(dim=1, keepdim=True) / largest).clamp(min=1e-12)
    scaled = (wide / scales).clamp(-largest, largest)
    qweight = scaled.round().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
    return QuantizedWeight(qweight, scales, None, weight.shape[1], None, weight.dtype)


def from_g_idx(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor, dtype: torch.dtype
) -> QuantizedWeight:
    """Codes [out, in], one in each element, whose inputs belong to `g_idx` [in], a tensor on the host; drops scales
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
    """Matrices of the same inputs one under the other; where their g_idx differ, each is split by the others'."""
    first = weights[0]
    if len(weights) == 1:
        return first
    qweight = torch.cat([_bytes(weight.qweight) for weight in weights]).view(first.qweight.dtype)
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
    return QuantizedWeight(
        qweight, torch.cat(scales), torch.cat(present) if present else None, first.group_size, g_idx, first.dtype
    )


def pack_halves(qweight: Tensor) -> Tensor:
    """Codes [out, in] below 16 → [out, in / 2] uint8; `in` is even."""
    low, high = qweight.to(torch.uint8).chunk(2, dim=1)
    return low | high << 4


def unpack_halves(packed: Tensor) -> Tensor:
    """[out, in / 2] uint8 → qweight [out, in] uint8."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bytes(qweight: Tensor) -> Tensor:
    return qweight.view(torch.uint8)  # torch does not concatenate e4m3 everywhere
