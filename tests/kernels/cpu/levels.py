"""The kernels' instruction levels that tests can run here, and the precision that they have."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenloom.kernels.cpu.processor import instruction_levels

LEVELS = instruction_levels()
EMULATED_AMX = "AMX in plain C"
BF16_EPS = 2.0**-8  # one unit in the last place of a number near 1: results may round to either neighbour


def kinds() -> list[tuple[torch.dtype, str]]:
    """List element types and levels. Float32 is the same code at all levels with AVX-512. With AVX512-BF16 and no AMX,
    the AMX level runs on tiles in plain C."""
    own_float32 = [level for level in LEVELS if level in ("AVX-512", "AVX2")]
    of_bf16 = [*LEVELS, EMULATED_AMX] if "AVX512-BF16" in LEVELS and "AMX" not in LEVELS else LEVELS
    return [(torch.float32, level) for level in own_float32] + [(torch.bfloat16, level) for level in of_bf16]


def check(answer: Tensor, exact: Tensor, atol: float = 1e-4) -> None:
    """`exact` is float32. Each element may be off by its rounding and by `atol` for sums in another order."""
    rtol = BF16_EPS if answer.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(answer.float(), exact, rtol=rtol, atol=atol)
