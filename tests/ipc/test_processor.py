"""`ipc` and `kernels` may not import each other, and both ask what the processor can."""

from __future__ import annotations

from tokenloom.ipc.processor import NEEDED, NEEDED_BY_AMX, has_avx2
from tokenloom.kernels.cpu.processor import _NEEDS, instruction_levels


def test_codes_are_kept_wherever_the_c_kernels_run() -> None:
    assert _NEEDS["AVX2"] == NEEDED and _NEEDS["AMX"] == NEEDED_BY_AMX
    assert has_avx2() == bool(instruction_levels())
