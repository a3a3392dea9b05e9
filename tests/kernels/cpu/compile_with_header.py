"""Compile the C kernels with a header that replaces some of their intrinsics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.kernels.cpu.compiler import SOURCE_FOLDER, find_compiler
from tokenloom.kernels.cpu.library import KernelLibrary, load_library
from tokenloom.kernels.cpu.library_store import cached_library, user_cache_folder


def compile_with_header(header: str, level: str, sources: Path) -> KernelLibrary:
    """Load the bf16 kernels with a header of this folder in front of every source, compiled if no test process of this
    user has done so; skip without a compiler. `sources`: a folder that is made here for them."""
    root = user_cache_folder()
    if find_compiler() is None or root is None:
        pytest.skip("needs a C compiler and a cache folder")
    text = Path(__file__).with_name(header).read_text(encoding="utf-8")
    sources.mkdir()
    for path in SOURCE_FOLDER.glob("*.[ch]"):
        front = text if path.suffix == ".c" else ""
        (sources / path.name).write_text(f"{front}#line 1\n{path.read_text(encoding='utf-8')}", encoding="utf-8")
    return load_library(cached_library(level, True, root / "tests", sources))
