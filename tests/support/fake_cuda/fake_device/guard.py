"""The device guard of CUDA for torch's C++, which a build for CPUs lacks.

It is the guard of meta devices, which does nothing, with other answers about the kind of device and which is current.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from . import streams

CUDA, META = 1, 14  # of c10::DeviceType
NUM_FUNCTIONS = 48  # more than the class has
TYPE, EXCHANGE_DEVICE, GET_DEVICE = range(3)  # of c10::impl::DeviceGuardImplInterface, in order
REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"

_Function = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)  # (this) -> c10::Device: type, index
_kept: list[object] = []


def install() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, REGISTRY)
    this = guards[META]
    assert this is not None, "torch has no guard for meta devices"
    table = ctypes.c_void_p.from_address(this).value
    functions = (ctypes.c_void_p * NUM_FUNCTIONS).from_address(table or 0)
    assert all(_Function(functions[each])(this) & 0xFF == META for each in (TYPE, GET_DEVICE)), "other functions"
    own = (ctypes.c_void_p * NUM_FUNCTIONS)(*functions)
    current, kind = _Function(lambda this: CUDA | streams.current_device() << 8), _Function(lambda this: CUDA)
    own[EXCHANGE_DEVICE] = own[GET_DEVICE] = ctypes.cast(current, ctypes.c_void_p).value
    own[TYPE] = ctypes.cast(kind, ctypes.c_void_p).value
    guard = ctypes.c_void_p(ctypes.addressof(own))
    _kept.extend((own, current, kind, guard))
    guards[CUDA] = ctypes.addressof(guard)
