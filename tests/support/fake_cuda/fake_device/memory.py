"""Memory of the fake devices: which storages are allocated, their sum and its peak, and which host memory is pinned."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TOTAL_BYTES = 16 << 30
CONTEXT_BYTES = 64 << 20  # of a process

_lock = threading.RLock()  # a storage may be freed while one is counted
_used: dict[int, int] = {}  # by device
_peak: dict[int, int] = {}
_registered: list[tuple[int, int]] = []  # address and bytes of host memory that was pinned after its allocation


@dataclass
class Allocation:
    """An attribute of a storage; counts it until its end."""

    device: int
    num_bytes: int

    def __post_init__(self) -> None:
        with _lock:
            _used[self.device] = _used.get(self.device, 0) + self.num_bytes
            _peak[self.device] = max(_peak.get(self.device, 0), _used[self.device])

    def __del__(self) -> None:
        with _lock:
            _used[self.device] -= self.num_bytes


def check(device: int, num_bytes: int) -> None:
    """Raise OutOfMemoryError if so much is not free."""
    free = free_bytes(device)
    if num_bytes > free:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {num_bytes / 2**30:.2f} GiB. GPU {device} has a total capacity of "
            f"{TOTAL_BYTES / 2**30:.2f} GiB of which {free / 2**30:.2f} GiB is free (fake device)"
        )


def count(inner: Tensor, device: int) -> None:
    """Count the storage of a tensor, if it is new."""
    storage = inner.untyped_storage()
    if not hasattr(storage, "allocation"):
        storage.allocation = Allocation(device, storage.nbytes())  # type: ignore[attr-defined]


def untouched_zeros(like: Tensor) -> Tensor:
    """Return zeros of this shape on the host; a page takes memory when it is written."""
    return torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape)


def free_bytes(device: int) -> int:
    return TOTAL_BYTES - CONTEXT_BYTES - _used.get(device, 0)


def used_bytes(device: int) -> int:
    return _used.get(device, 0)


def peak_bytes(device: int) -> int:
    return max(_peak.get(device, 0), _used.get(device, 0))


def reset_peak(device: int) -> None:
    _peak[device] = used_bytes(device)


def pin(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().is_pinned_here = True  # type: ignore[attr-defined]
    return tensor


def register(address: int, num_bytes: int) -> None:
    _registered.append((address, num_bytes))


def is_pinned(tensor: Tensor) -> bool:
    if hasattr(tensor.untyped_storage(), "is_pinned_here"):
        return True
    address = tensor.untyped_storage().data_ptr()
    return any(start <= address < start + size for start, size in _registered)
