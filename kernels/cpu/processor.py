"""Instruction levels of this processor. Knows nothing of compilers or libraries."""

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
    """Return the levels of `instruction_levels()` from `isa` down, best first. isa: "auto" for all, or a level's name
    in lower case without "-". ValueError if the processor lacks it."""
    names = instruction_levels()
    if isa == "auto":
        return names
    short = [name.lower().replace("-", "") for name in names]
    if isa not in short:
        raise ValueError(f"this processor has no {isa}, but: {', '.join(short) or 'no AVX2'}")
    return names[short.index(isa) :]


def instruction_levels() -> list[str]:
    """Return the levels that this processor supports, best first; [] if it is not an x86-64. This requests Linux's
    permission to use AMX; without it AMX is left out."""
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
