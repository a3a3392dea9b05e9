"""Products with int8 and int4 weights as integers: equal to exact sums of the rounded rows, alone and in any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import GATED_SILU, Activation
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.kernels.quantized import QuantizedWeight, pack_halves, quantize, unpack_halves
from tokenloom.tests.kernels.cpu.levels import kinds

ROWS = (1, 3, 6, 13, 33, 70)
SHAPES = [  # outputs, inputs, inputs of a group
    *((64, 96, 32), (200, 512, 128), (33, 320, 64), (96, 160, 128)),
    *((48, 256, 256), (40, 300, 300), (40, 300, 32), (7, 26, 26)),
]
GELU = Activation("gelu")
KINDS = [kind for kind in kinds() if kind[0] == torch.bfloat16]

pytestmark = pytest.mark.parametrize("kind", KINDS, indirect=True, ids=str, scope="session")


@pytest.fixture(scope="module")
def ops(library: KernelLibrary, kind: tuple[torch.dtype, str]) -> CpuOps:
    found = CpuOps(library, kind[0], has_integer_products=True)
    assert found.has_integer_products
    return found


def random_weight(num_bits: int, shape: tuple[int, int], group_size: int, form: str = "zeros") -> QuantizedWeight:
    num_groups = -(-shape[1] // group_size)
    scales = (torch.rand(shape[0], num_groups) * 0.02 + 0.001).half().float()
    if num_bits == 8:
        return QuantizedWeight(
            torch.randint(-128, 128, shape).to(torch.int8), scales, None, group_size, None, torch.bfloat16
        )
    codes, zeros = (
        torch.randint(0, 16, shape, dtype=torch.uint8),
        torch.randint(0, 256, scales.shape, dtype=torch.uint8),
    )
    if form == "levels":
        levels = (-128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)
        return QuantizedWeight(pack_halves(codes), scales, None, group_size, None, torch.bfloat16, None, levels)
    if form == "mins":
        mins = (torch.randn(scales.shape) * 0.05).half().float()
        return QuantizedWeight(pack_halves(codes), scales, None, group_size, None, torch.bfloat16, mins)
    return QuantizedWeight(pack_halves(codes), scales, zeros, group_size, None, torch.bfloat16)


def exact(weight: QuantizedWeight) -> Tensor:
    """Return the matrix in float64."""
    codes = (unpack_halves(weight.qweight) if weight.is_packed else weight.qweight).double()
    if weight.levels is not None:
        codes = torch.tensor(weight.levels).double()[codes.int()]
    groups = weight.input_groups()
    if weight.zeros is not None:
        codes -= weight.zeros.double()[:, groups] / 8
    codes *= weight.scales.double()[:, groups]
    return codes if weight.mins is None else codes - weight.mins.double()[:, groups]


def rounded(x: Tensor) -> Tensor:
    """Round 32 inputs at a time to 8 bits: [rows, inputs] float64."""
    num_inputs = x.shape[1]
    parts = torch.nn.functional.pad(x.float(), (0, -num_inputs % 32)).unflatten(1, (-1, 32))
    most = parts.abs().amax(2, keepdim=True)
    factor = torch.where(most > 0, torch.full_like(most, 127) / most, 0)
    return ((parts * factor).round().double() * (most / 127).double()).flatten(1)[:, :num_inputs]


def check(found: Tensor, expected: Tensor) -> None:
    """Sums of float32 are off by a few units of their largest parts, and bfloat16 by its rounding."""
    size = expected.abs().mean(1, keepdim=True)
    rtol = 2.0**-8 if found.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(found.double() / size, expected / size, rtol=rtol, atol=3e-5)


@pytest.mark.parametrize(("num_bits", "form"), [(8, "scales"), (4, "zeros"), (4, "mins"), (4, "levels")])
def test_products_are_those_of_the_rounded_rows(ops: CpuOps, num_bits: int, form: str) -> None:
    torch.manual_seed(num_bits)
    for (outputs, inputs, group_size), num_rows in product(SHAPES, ROWS):
        weight = random_weight(num_bits, (outputs, inputs), group_size, form)
        bias = torch.randn(outputs).bfloat16()
        x = (torch.randn(num_rows, inputs) * torch.rand(num_rows, 1).mul(9).exp()).bfloat16()
        x[-1, : inputs // 2] = 0
        packed = ops.pack_linear(weight, bias)
        check(ops.logits(x, packed), rounded(x) @ exact(weight).T + bias.double())
        most = {8: 0.7, 4: 0.5}[num_bits] * CpuOps(ops.library, ops.dtype).pack_linear(weight, bias).nbytes
        assert packed.nbytes < most


@pytest.mark.parametrize("form", ["scales", "zeros", "mins", "levels"])
def test_sums_of_the_largest_codes_and_inputs_do_not_overflow(ops: CpuOps, form: str) -> None:
    num_bits = 8 if form == "scales" else 4
    weight = random_weight(num_bits, (64, 256), 64, form)
    for code in (-128, 127) if num_bits == 8 else (0, 15):
        codes = torch.full((64, 256), code)
        qweight = codes.to(torch.int8) if num_bits == 8 else pack_halves(codes)
        extreme = replace(weight, qweight=qweight)
        x = torch.cat([torch.ones(2, 256), -torch.ones(3, 256)]).bfloat16()
        check(ops.logits(x, ops.pack_linear(extreme, None)), x.double() @ exact(extreme).T)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_outputs_go_through_activations(ops: CpuOps, num_bits: int) -> None:
    torch.manual_seed(3)
    weight, x = random_weight(num_bits, (2 * 80, 128), 32), torch.randn(9, 128).bfloat16()
    gate, up = (rounded(x) @ exact(weight).T).chunk(2, dim=1)
    check(ops.linear(x, ops.pack_linear(weight, None, GATED_SILU)), torch.nn.functional.silu(gate) * up)
    plain = torch.nn.functional.gelu(torch.cat([gate, up], dim=1))
    check(ops.linear(x, ops.pack_linear(weight, None, GELU)), plain)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_a_row_has_the_same_bits_in_any_batch_and_team(
    ops: CpuOps, num_bits: int, num_threads: Callable[[int], None]
) -> None:
    torch.manual_seed(4)
    packed = ops.pack_linear(random_weight(num_bits, (96, 640), 128), None)
    x = torch.randn(70, 640).bfloat16()
    together = ops.logits(x, packed)
    for row in (0, 5, 33, 69):
        assert torch.equal(ops.logits(x[row : row + 1], packed)[0], together[row])
    num_threads(3 - min(torch.get_num_threads(), 2))
    assert torch.equal(ops.logits(x, packed), together)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_input_that_is_no_number_shows_in_its_row_alone(ops: CpuOps, value: float) -> None:
    packed = ops.pack_linear(random_weight(8, (40, 128), 128), None)
    x = torch.ones(3, 128).bfloat16()
    x[1, 70] = value
    assert ops.logits(x, packed).isnan().all(1).tolist() == [False, True, False]


def test_an_embedding_is_read_from_the_codes_of_the_head(ops: CpuOps) -> None:
    torch.manual_seed(5)
    weight = quantize(torch.randn(100, 72).bfloat16(), "int8")
    ids = torch.tensor([0, 99, 31, 32, 100, -1])
    expected = torch.cat([weight.dequantize(), torch.zeros(1, 72).bfloat16()])[[0, 99, 31, 32, 100, 100]]
    assert torch.equal(ops.embedding(ids, ops.pack_linear(weight, None), 0), expected)


@pytest.mark.parametrize("is_cut", [True, False])
def test_weights_of_other_forms_become_floats(ops: CpuOps, is_cut: bool) -> None:
    torch.manual_seed(7)
    width = 96 if is_cut else 80  # a group of 48 is no whole line, nor are 80 inputs
    weight = random_weight(8, (64, 96), 48) if is_cut else quantize(torch.randn(64, 80).bfloat16(), "fp8")
    x = torch.randn(3, width).bfloat16()
    plain = CpuOps(ops.library, ops.dtype)
    assert torch.equal(ops.logits(x, ops.pack_linear(weight, None)), plain.logits(x, plain.pack_linear(weight, None)))


@pytest.mark.parametrize("group", [128, 384])  # blocks of inputs, or a scale for each output
def test_fp8_weights_become_codes_near_their_floats(ops: CpuOps, group: int) -> None:
    """The oracle multiplies the floats that the weight stands for, in float64."""
    torch.manual_seed(9)
    weight = quantize(torch.randn(200, 384) * torch.rand(200, 1), "fp8", torch.bfloat16, group)
    values, x = replace(weight, dtype=torch.float32).dequantize(), torch.randn(5, 384).bfloat16()
    packed = ops.pack_linear(weight, None)
    assert packed.nbytes * 8 == 224 * 384 * 8.5, "7 pairs of tiles"
    largest = values.abs().unflatten(1, (-1, 32)).amax(2)
    rounded = largest.double() / 254 * (1 + 2**-8)  # the scale is in half precision
    inputs = x.double().abs().unflatten(1, (-1, 32))
    moved = torch.einsum("rgi,og->ro", inputs, rounded)
    moved += torch.einsum("rg,ogi->ro", inputs.amax(2) / 254, values.double().abs().unflatten(1, (-1, 32))) * 1.01
    found, exact_sums = ops.logits(x, packed).double(), x.double() @ values.double().T
    assert ((found - exact_sums).abs() <= moved + 1e-4).all() and not torch.equal(found, exact_sums)
    assert (found - exact_sums).std() < 0.02 * exact_sums.std()
