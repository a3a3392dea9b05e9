"""The kernels of every instruction level as fixtures."""

from __future__ import annotations

import pytest
import torch

from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.kernels.cpu.loader import load_level
from tokenloom.tests.kernels.cpu.compile_with_header import compile_with_header
from tokenloom.tests.kernels.cpu.levels import EMULATED_AMX, kinds


@pytest.fixture(scope="session", params=kinds(), ids=lambda kind: f"{kind[0]}-{kind[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[torch.dtype, str]:
    element_type_and_level: tuple[torch.dtype, str] = request.param
    return element_type_and_level


@pytest.fixture(scope="session")
def library(kind: tuple[torch.dtype, str], tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    element_type, level = kind
    if level != EMULATED_AMX:
        return load_level(level, element_type == torch.bfloat16).library
    target = tmp_path_factory.mktemp("emulated") / "kernels.so"
    return compile_with_header("amx_emulation.h", "AVX512-BF16", target)


@pytest.fixture(scope="session")
def ops(library: KernelLibrary, kind: tuple[torch.dtype, str]) -> CpuOps:
    return CpuOps(library, kind[0])
