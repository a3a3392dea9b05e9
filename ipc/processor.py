"""Instructions of this machine's processor, read from /proc/cpuinfo."""

from __future__ import annotations

import functools
import platform

# As kernels/cpu/processor.py has them, which may not import this file.
NEEDED = {"avx2", "fma", "f16c"}
NEEDED_BY_AMX = {
    *("amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"),
}


def cpu_flags() -> set[str]:
    """Return the flags of /proc/cpuinfo; none if the processor is not of x86."""
    if platform.machine() != "x86_64":
        return set()
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        flags = next((line for line in file if line.startswith("flags")), "")
    return set(flags.split())


@functools.cache
def has_avx2() -> bool:
    """Return whether the processor has AVX2, FMA and F16C, the least that the C kernels need."""
    return cpu_flags() >= NEEDED


@functools.cache
def has_amx() -> bool:
    """Return whether the processor has AMX and the instructions that the C kernels use beside it."""
    return cpu_flags() >= NEEDED_BY_AMX
