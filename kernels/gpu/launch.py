"""Launch cache: finds the compiled kernel by launch signature instead of Triton's 15 to 50 µs dispatch.

Many kernels of a short step take less time on the device than that dispatch. A signature contains everything by which
Triton specializes: the kernel, the device, the dtype and alignment of each tensor, each constant, and for each integer
whether it is 1, whether it is a multiple of 16 and whether it fits in 32 bits. The first launch of a signature goes
through Triton. Importing this module replaces JITFunction.run. Launching uses private parts of Triton; with versions
that are not tested, Triton dispatches every launch.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any, TypeAlias

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

Signature: TypeAlias = tuple[Any, ...]

KNOWN_VERSIONS = ((3, 6), (3, 9))  # first and last tested version of Triton
ALIGNMENT = 16  # Triton specializes pointers and integers by divisibility by this

_PACKAGE = __name__.partition(".")[0] + "."
_launch = JITFunction.run
_cache: dict[Signature, tuple[Any, tuple[Any, ...]]] = {}  # compiled kernel, and its constants in parameter order


def _launch_cached(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """Launch a kernel like JITFunction.run. Kernels of this package use the cache, except in a warmup or if launch
    hooks are set; their constants must be passed by name and all other arguments by position."""
    if (
        warmup
        or not function.module.startswith(_PACKAGE)
        or knobs.runtime.launch_enter_hook.calls
        or knobs.runtime.launch_exit_hook.calls
    ):
        return _launch(function, *arguments, grid=grid, warmup=warmup, **options)
    active = driver.active
    device = active.get_current_device()
    signature = signature_of(function, device, arguments, options)
    cached = _cache.get(signature)
    if cached is None:
        kernel = _launch(function, *arguments, grid=grid, warmup=warmup, **options)
        _cache[signature] = kernel, tuple(options[name] for name in function.arg_names[len(arguments) :])
        return kernel
    kernel, constants = cached
    x, y, z = (*grid, 1, 1)[:3]
    kernel.run(
        x,
        y,
        z,
        active.get_current_stream(device),
        kernel.function,
        kernel.packed_metadata,
        None,  # launch metadata, only for hooks
        None,  # the hook before a launch
        None,  # the hook after it
        *arguments,
        *constants,
    )
    return kernel


def signature_of(function: Any, device: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Signature:
    """Build a key that two launches share only if they run the same compiled kernel."""
    signature: list[Any] = [id(function), device]
    for value in arguments:
        if isinstance(value, Tensor):
            signature.append(value.dtype)
            signature.append(value.data_ptr() % ALIGNMENT == 0)
        elif type(value) is int:
            is_narrow = -(1 << 31) <= value < 1 << 31
            signature.append((value == 1) + 2 * (value % ALIGNMENT == 0) + 4 * is_narrow)
        else:
            signature.append(type(value))
    return (*signature, *options, *options.values())


def next_power_of_2(number: int) -> int:
    """Round up to a power of two; triton.next_power_of_2 takes microseconds on the host."""
    return 1 << (number - 1).bit_length()


_version = tuple(int(number) for number in triton.__version__.split(".")[:2])
launch = _launch_cached if KNOWN_VERSIONS[0] <= _version <= KNOWN_VERSIONS[1] else _launch
JITFunction.run = launch
if hasattr(knobs.language, "default_fp_fusion"):  # allow fused multiply-add; Triton 3.9 warns if this is not set
    knobs.language.default_fp_fusion = True
