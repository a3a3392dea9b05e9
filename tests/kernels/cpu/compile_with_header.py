"""Compile the C kernels with a header that replaces some of their intrinsics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.kernels.cpu.compiler import compile_library, find_compiler
from tokenloom.kernels.cpu.library import KernelLibrary, load_library


def compile_with_header(header: str, level: str, target: Path) -> KernelLibrary:
    """Compile the bf16 kernels with a header of this folder in front of every source; skip without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("needs a C compiler")
    compile_library(compiler, level, True, ["-include", str(Path(__file__).with_name(header))], target)
    return load_library(target)
