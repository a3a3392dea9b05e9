"""The C kernels fit 4-bit codes with the bits of plain torch, at every instruction level."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.quantized import QuantizedWeight, quantize


def matrices() -> list[Tensor]:
    torch.manual_seed(5)
    heavy = torch.distributions.StudentT(3.0).sample((600, 1024))  # one rounding less shows in 1 of 3,000 groups
    shifted = torch.rand(33, 64) + 0.5
    broken = torch.randn(17, 128) * 0.02
    broken[0, 3], broken[4, 70], broken[16, 127] = torch.nan, torch.inf, -torch.inf
    small = torch.stack([torch.zeros(256), torch.full((256,), 0.1), torch.randn(256) * 1e-6, torch.randn(256) * 1e5])
    return [heavy, shifted, broken, small, torch.randn(1, 64), torch.zeros(0, 64)]


def bits(weight: QuantizedWeight) -> list[Tensor]:
    assert weight.zeros is not None
    return [weight.qweight, weight.scales.nan_to_num(-1), weight.zeros]


def test_codes_scales_and_zeros_are_those_of_plain_torch(ops: CpuOps) -> None:
    for matrix in matrices():
        weight = matrix.to(ops.dtype)
        found, expected = ops.quantize(weight, "int4"), quantize(weight, "int4")
        assert found.dtype == expected.dtype and found.group_size == expected.group_size
        assert all(map(torch.equal, bits(found), bits(expected)))


def test_any_team_and_any_layout_give_the_same_bits(ops: CpuOps, num_threads: Callable[[int], None]) -> None:
    weight = matrices()[0][:50, :192].to(ops.dtype)
    expected = bits(quantize(weight, "int4"))
    for count in (1, 2, 3):
        num_threads(count)
        assert all(map(torch.equal, bits(ops.quantize(weight, "int4")), expected))
    assert all(map(torch.equal, bits(ops.quantize(weight.T.contiguous().T, "int4")), expected))


@pytest.mark.parametrize("matrix", [torch.ones(3, 96), torch.ones(3, 64, dtype=torch.float16)], ids=["96", "half"])
def test_what_the_kernel_cannot_take_is_rounded_in_plain_torch(ops: CpuOps, matrix: Tensor) -> None:
    found, expected = ops.quantize(matrix, "int4"), quantize(matrix, "int4")
    assert torch.equal(found.qweight, expected.qweight) and found.is_packed == expected.is_packed
