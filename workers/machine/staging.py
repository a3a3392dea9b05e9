"""Staging: copies all arrays of a step to the device in one copy, from pinned memory.

Two buffers alternate: the host fills one while the device copies the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

NUM_BUFFERS = 2
_ALIGNMENT = 16  # of each array: Triton specializes kernels on pointers aligned to 16 bytes
_FIRST_BYTES = 1 << 16
_SENT_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
_DTYPES = {torch.empty(0, dtype=dtype).numpy().dtype: dtype for dtype in _SENT_DTYPES}


class Staging:
    """Copier of arrays to `device`, on its current stream. The host waits only until the copy before the previous one
    is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [_Buffer(device) for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """Start to copy arrays of _SENT_DTYPES; return the tensors on the device, which are valid in stream order."""
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._turn = (self._turn + 1) % NUM_BUFFERS
        buffer = self._buffers[self._turn]
        buffer.fill(arrays, starts, end)
        words = buffer.copy(end)
        wholes = {dtype: words.view(_DTYPES[dtype]) for dtype in {array.dtype for array in arrays}}
        return [_part(wholes[array.dtype], start, array) for start, array in zip(starts, arrays, strict=True)]


class _Buffer:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = self._allocate(_FIRST_BYTES)
        self._is_copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def fill(self, arrays: Sequence[npt.NDArray[Any]], starts: Sequence[int], num_bytes: int) -> None:
        if self._is_copied is not None:
            self._is_copied.synchronize()  # waits for this buffer's last copy, two steps ago
        if num_bytes > self._host.numel():
            self._host = self._allocate(1 << (num_bytes - 1).bit_length())
        host = self._host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            if array.size:
                host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[:] = array

    def copy(self, num_bytes: int) -> Tensor:
        words = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        words.copy_(self._host[:num_bytes], non_blocking=True)
        if self._is_copied is not None:
            self._is_copied.record()
        return words


def _part(whole: Tensor, start: int, array: npt.NDArray[Any]) -> Tensor:
    """Return the copy of `array` in `whole`, which is all sent bytes viewed as the array's dtype. start: index of the
    array's first byte."""
    first = start // array.itemsize
    part = whole[first : first + array.size]
    return part if array.ndim == 1 else part.view(array.shape)
