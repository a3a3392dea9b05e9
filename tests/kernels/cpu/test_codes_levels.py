"""Products with codes have the same bits on every instruction level."""

from __future__ import annotations

import pytest
import torch

from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.loader import load_level
from tokenloom.tests.kernels.cpu.levels import LEVELS
from tokenloom.tests.kernels.cpu.test_codes import random_weight


@pytest.mark.skipif(not LEVELS, reason="the processor has no AVX2")
@pytest.mark.parametrize(("num_bits", "form"), [(8, "scales"), (4, "zeros"), (4, "mins"), (4, "levels")])
def test_all_levels_give_the_same_bits(num_bits: int, form: str) -> None:
    torch.manual_seed(1)
    weight, x = random_weight(num_bits, (72, 320), 32, form), torch.randn(9, 320).bfloat16()
    found = []
    for level in LEVELS:
        ops = CpuOps(load_level(level, True).library, torch.bfloat16, has_integer_products=True)
        assert ops.has_integer_products
        found.append(ops.logits(x, ops.pack_linear(weight, None)))
    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0].std() > 0
