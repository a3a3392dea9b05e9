"""TensorBuffer: memory for the tensors of one layer at a time, as an adapter's file has them.

The file is read, not mapped, so that a damaged or shortened file is an error of one fill and ends no process. Layers
that follow each other in the file share a read, and all fills share the memory: many small reads and new pages would
cost more than the tensors themselves.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ....ipc.errors import RequestError
from ....ipc.process.arena import PAGE
from ....ipc.process.page_file import WINDOW_BYTES, PageFile, new_pages
from ....ipc.spec.adapters.tensor_header import TensorPlace

MAX_KEPT_BYTES = 64 << 20  # more than the layers of most adapters take
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Held(NamedTuple):
    """Bytes of the file that are in memory."""

    start: int  # in the file
    stop: int
    address: int  # in the memory


class TensorBuffer:
    """Owner of the memory: WINDOW_BYTES, or as much as the largest read took, but at most `max_kept_bytes`."""

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self.pages = new_pages(WINDOW_BYTES)  # for other uses until `open`
        self._file: PageFile
        self._shown = ""
        self._content: Tensor
        self._held: list[_Held] = []  # by rising starts

    def open(self, file: PageFile, shown: str) -> None:
        """Read from another file from now on, named `shown` in errors."""
        self._file, self._shown, self._held = file, shown, []

    def read(self, places: Collection[TensorPlace]) -> dict[int, Tensor]:
        """Return the tensors at `places`, none of them empty, by their offsets in the file. They are valid until the
        next call. RequestError if the file ends before them."""
        if not all(self._find(place) for place in places):
            self._load(_page_runs(places))
        return {place.offset: self._tensor(place) for place in places}

    def _load(self, runs: list[range]) -> None:
        if runs[-1].stop - runs[0].start <= WINDOW_BYTES:
            runs = [range(runs[0].start, runs[0].start + WINDOW_BYTES)]  # the next layers, too
        num_bytes = sum(map(len, runs))
        pages = self.pages if num_bytes <= len(self.pages) else new_pages(num_bytes)
        if len(pages) <= self._max_kept_bytes:
            self.pages = pages
        self._content, self._held, address = torch.frombuffer(pages, dtype=torch.uint8), [], 0
        for run in runs:
            count = self._file.read(pages[address : address + len(run)], run.start)
            self._held.append(_Held(run.start, run.start + count, address))
            address += len(run)

    def _find(self, place: TensorPlace) -> _Held | None:
        """Return the run in memory that has all of a tensor."""
        index = bisect.bisect(self._held, place.offset, key=lambda each: each.start) - 1
        if index < 0 or self._held[index].stop < place.offset + place.num_bytes:
            return None
        return self._held[index]

    def _tensor(self, place: TensorPlace) -> Tensor:
        """Return a view of the memory, or a copy if the tensor begins between two elements."""
        held, dtype = self._find(place), DTYPES[place.dtype]
        if held is None:
            raise RequestError(f"{self._shown}: the file ends within tensor {place.name}: load the adapter again")
        first = held.address + place.offset - held.start
        content = self._content[first : first + place.num_bytes]
        return (content if first % dtype.itemsize == 0 else content.clone()).view(dtype).view(place.shape)


def _page_runs(places: Iterable[TensorPlace]) -> list[range]:
    """Return the pages that hold tensors as runs of consecutive bytes, by rising offsets."""
    runs: list[range] = []
    for place in sorted(places, key=lambda each: each.offset):
        start, stop = place.offset // PAGE * PAGE, -(-(place.offset + place.num_bytes) // PAGE) * PAGE
        if runs and start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, stop)
        else:
            runs.append(range(start, stop))
    return runs
