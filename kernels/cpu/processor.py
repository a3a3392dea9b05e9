"""Instruction levels of this processor. Knows nothing of compilers and libraries."""

from __future__ import annotations

import ctypes
import platform

_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"}
_NEEDS = {  # required flags in /proc/cpuinfo by level, best first
    "AMX": {"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni", *_AVX512},
    "AVX512-BF16": {"avx512_bf16", "avx512_vnni", *_AVX512},
    "AVX-512": _AVX512,
    "AVX2": {"avx2", "fma", "f16c"},
}
_ARCH_PRCTL = 158  # system call on x86-64
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


def levels_up_to(isa: str = "auto") -> list[str]:
    """List `instruction_levels()` from `isa` down (avx512bf16 for AVX512-BF16; auto: all); ValueError without it."""
    names = instruction_levels()
    if isa == "auto":
        return names
    short = [name.lower().replace("-", "") for name in names]
    if isa not in short:
        raise ValueError(f"this processor has no {isa}, but: {', '.join(short) or 'no AVX2'}")
    return names[short.index(isa) :]


def instruction_levels() -> list[str]:
    """List the levels that this processor supports, best first, none if it is no x86-64. AMX is listed if Linux permits
    this process to use it, which is requested here."""
    if platform.machine() != "x86_64":
        return []
    flags = _processor_flags()
    names = [name for name, needed in _NEEDS.items() if needed <= flags]
    if "AMX" in names and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
        names.remove("AMX")
    return names


def _processor_flags() -> set[str]:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("flags"):
                return set(line.split(":", 1)[1].split())
    return set()
