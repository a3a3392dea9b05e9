"""The kernels' instruction levels that tests can run here, and the precision that they have.

Each level takes a compilation of all kernels. The default run has the best one and AVX2, and of those between them one,
another one each day.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.tests.support.today import chosen

_ALL = instruction_levels()
LEVELS = [*_ALL[:1], *chosen(_ALL[1:-1], 1), *_ALL[1:][-1:]]
FLOAT32_LEVELS = [*LEVELS[:1], *LEVELS[1:][-1:]]  # the code is the same for all levels with AVX-512
EMULATED_AMX = "AMX in plain C"
BF16_EPS = 2.0**-8  # one unit in the last place of a number near 1: results may round to either neighbour


def kinds() -> list[tuple[torch.dtype, str]]:
    """List element types and levels. With AVX512-BF16 and no AMX, the AMX level runs on tiles in plain C."""
    of_bf16 = [*LEVELS, EMULATED_AMX] if "AVX512-BF16" in _ALL and "AMX" not in _ALL else LEVELS
    return [(torch.float32, level) for level in FLOAT32_LEVELS] + [(torch.bfloat16, level) for level in of_bf16]


def check(answer: Tensor, exact: Tensor, atol: float = 1e-4) -> None:
    """`exact` is float32. Each element may be off by its rounding and by `atol` for sums in another order."""
    rtol = BF16_EPS if answer.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(answer.float(), exact, rtol=rtol, atol=atol)
