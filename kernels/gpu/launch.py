"""Launches that are known: a kernel that was launched before in the same form is found by a look.

Triton takes 15 to 50 µs of Python to find out which compiled kernel a launch means, more than many a kernel of a short
step takes on the device. A form is all that Triton specializes by: the kernel and its device, dtype and alignment of
each tensor, of each integer whether it is 1, whether 16 divides it and its width, and each constant. What Triton itself
compiled for the form is launched with the new arguments. How Triton launches is private to it: in versions other than
those that this was tested with, every launch is its own.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any, TypeAlias

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

Form: TypeAlias = tuple[Any, ...]

KNOWN_VERSIONS = ((3, 6), (3, 9))  # of Triton, the first and the last
ALIGNMENT = 16  # bytes of a pointer, and divisor of an integer, that Triton specializes by

_PACKAGE = __name__.partition(".")[0] + "."
_launch = JITFunction.run
_known: dict[Form, tuple[Any, tuple[Any, ...]]] = {}  # by form the compiled kernel, and the constants in its order


def _launch_known(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """JITFunction.run; of kernels of this package alone, which take their constants, and nothing else, by name."""
    if (
        warmup
        or not function.module.startswith(_PACKAGE)
        or knobs.runtime.launch_enter_hook.calls
        or knobs.runtime.launch_exit_hook.calls
    ):
        return _launch(function, *arguments, grid=grid, warmup=warmup, **options)
    active = driver.active
    device = active.get_current_device()
    form = form_of(function, device, arguments, options)
    known = _known.get(form)
    if known is None:
        kernel = _launch(function, *arguments, grid=grid, warmup=warmup, **options)
        _known[form] = kernel, tuple(options[name] for name in function.arg_names[len(arguments) :])
        return kernel
    kernel, constants = known
    x, y, z = (*grid, 1, 1)[:3]
    kernel.run(
        *(x, y, z, active.get_current_stream(device), kernel.function, kernel.packed_metadata, None, None, None),
        *arguments,
        *constants,
    )
    return kernel


def form_of(function: Any, device: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Form:
    """Equal for launches of one compiled kernel alone."""
    form: list[Any] = [id(function), device]
    for value in arguments:
        if isinstance(value, Tensor):
            form.append(value.dtype)
            form.append(value.data_ptr() % ALIGNMENT == 0)
        elif type(value) is int:
            is_narrow = -(1 << 31) <= value < 1 << 31
            form.append((value == 1) + 2 * (value % ALIGNMENT == 0) + 4 * is_narrow)
        else:
            form.append(type(value))
    return (*form, *options, *options.values())


def next_power_of_2(number: int) -> int:
    """Triton's own is made for kernels as well, and takes microseconds on the host."""
    return 1 << (number - 1).bit_length()


_version = tuple(int(number) for number in triton.__version__.split(".")[:2])
launch = _launch_known if KNOWN_VERSIONS[0] <= _version <= KNOWN_VERSIONS[1] else _launch
JITFunction.run = launch
if hasattr(knobs.language, "default_fp_fusion"):  # a product and a sum may be one operation; 3.9 warns if none says so
    knobs.language.default_fp_fusion = True
