"""The kernels are compiled once, into the cache, on torch's own threads; where they cannot be, the reference serves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tokenloom.kernels.cpu.compiler import Unavailable, compiled_library, instruction_levels
from tokenloom.kernels.cpu.cpu_ops import CpuOps, make_cpu_ops
from tokenloom.kernels.ops import select_ops
from tokenloom.kernels.reference import ReferenceOps

CPU = torch.device("cpu")
LEVELS = instruction_levels()
needs_kernels = pytest.mark.skipif(not LEVELS, reason="the processor has no AVX2")


def fake_compiler(folder: Path, script: str) -> None:
    for name in ("cc", "gcc"):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


def test_every_processor_with_avx2_has_kernels() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert ("AVX2" in LEVELS) == ("avx2" in flags and "fma" in flags)


@needs_kernels
def test_a_library_is_compiled_once(tmp_path: Path) -> None:
    first = compiled_library(True, LEVELS[-1], tmp_path)
    written = first.stat().st_mtime_ns
    assert compiled_library(True, LEVELS[-1], tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [first.parent.name]  # nothing else is left


@needs_kernels
def test_only_torchs_openmp_is_loaded() -> None:
    make_cpu_ops(torch.bfloat16, LEVELS[0])
    maps = Path("/proc/self/maps").read_text().splitlines()
    copies = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert len(copies) == 1
    assert "torch" in copies.pop()


@needs_kernels
def test_a_broken_compiler_is_told_by_its_first_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, "echo no such flag >&2; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(Unavailable, match="exit code 3: no such flag"):
        compiled_library(True, LEVELS[0], tmp_path / "cache")


@needs_kernels
def test_without_compiler_or_cache_the_reference_serves_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tokenloom.kernels")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert type(select_ops(CPU, torch.bfloat16)) is ReferenceOps
    monkeypatch.setenv("PATH", str(tmp_path))
    assert type(select_ops(CPU, torch.bfloat16)) is ReferenceOps
    assert type(select_ops(CPU, torch.float16)) is ReferenceOps
    assert [word in line for word, line in zip(("cache", "compiler", "float16"), caplog.messages, strict=True)] == [
        True
    ] * 3


def test_enforce_reference_turns_the_kernels_off() -> None:
    assert type(select_ops(CPU, torch.bfloat16, enforce_reference=True)) is ReferenceOps
    if LEVELS:
        assert type(select_ops(CPU, torch.bfloat16)) is CpuOps
