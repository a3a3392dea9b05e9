"""The kernels of every instruction level as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.kernels.cpu.loader import load_level
from tokenloom.tests.kernels.cpu.compile_with_header import compile_with_header
from tokenloom.tests.kernels.cpu.levels import EMULATED_AMX, kinds


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session", params=kinds(), ids=lambda kind: f"{kind[0]}-{kind[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[torch.dtype, str]:
    element_type_and_level: tuple[torch.dtype, str] = request.param
    return element_type_and_level


@pytest.fixture(scope="session")
def library(kind: tuple[torch.dtype, str], tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    element_type, level = kind
    if level != EMULATED_AMX:
        return load_level(level, element_type == torch.bfloat16).library
    return compile_with_header("amx_emulation.h", "AVX512-BF16", tmp_path_factory.mktemp("emulated") / "sources")


@pytest.fixture(scope="session")
def ops(library: KernelLibrary, kind: tuple[torch.dtype, str]) -> CpuOps:
    return CpuOps(library, kind[0])


@pytest.fixture
def num_threads() -> Iterator[Callable[[int], None]]:
    """A function that sets the number of torch's threads, which is the old one again after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
