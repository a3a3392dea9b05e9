"""FiniteCheck: finds NaN and infinities in a file of tensors that is read piece by piece."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from ....ipc.errors import RequestError
from ....ipc.spec.adapters.tensor_header import SIZE_BY_DTYPE, TensorPlace

EXPONENTS = {"F64": 0x7FF0 << 48, "F32": 0x7F80 << 16, "BF16": 0x7F80, "F16": 0x7C00}  # all ones: NaN or infinity


class FiniteCheck:
    """Finder of NaN and infinities. Owns the runs to check, by rising offsets: a run is a sequence of tensors that
    follow each other in the file without a gap and have the same dtype."""

    def __init__(self, places: Iterable[TensorPlace], shown: str) -> None:
        """`places`: the tensors to check. `shown`: the folder to name in errors."""
        self._shown = shown
        self._scratch = bytearray()  # reused, since new large blocks cost page faults (return_large_blocks)
        self._runs: list[list[TensorPlace]] = []
        for place in sorted(places, key=lambda each: each.offset):
            last = self._runs[-1][-1] if self._runs else None
            if last is not None and last.dtype == place.dtype and _end(last) == place.offset:
                self._runs[-1].append(place)
            else:
                self._runs.append([place])

    def pieces(self, num_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) offsets of consecutive pieces of a file. A piece contains elements of a single run, or
        only bytes that are not checked. `piece_bytes`: size of the largest piece, a multiple of 8."""
        edges = {0, num_bytes}.union(*((run[0].offset, _end(run[-1])) for run in self._runs))
        start = 0
        for edge in sorted(edges):
            while start < edge:
                stop = min(start + piece_bytes, edge)
                yield start, stop
                start = stop

    def check(self, start: int, piece: memoryview) -> None:
        """Raise RequestError for the first element of a piece that is NaN or infinite. `start`: offset of the piece,
        one of `pieces`."""
        import numpy as np  # takes 0.1 s, and most engines load no adapter

        run = self._run_at(start)
        if run is None:
            return
        item_bytes, exponent = SIZE_BY_DTYPE[run[0].dtype], EXPONENTS[run[0].dtype]
        if len(self._scratch) < len(piece):
            self._scratch = bytearray(len(piece))
        numbers = np.frombuffer(piece, f"<u{item_bytes}")
        exponents = np.frombuffer(self._scratch, numbers.dtype, len(numbers))
        np.bitwise_and(numbers, numbers.dtype.type(exponent), out=exponents)
        if exponents.max(initial=0) != exponent:
            return
        offset = start + int(exponents.argmax()) * item_bytes
        place = run[bisect.bisect(run, offset, key=lambda each: each.offset) - 1]
        index = (offset - place.offset) // item_bytes
        raise RequestError(
            f"{self._shown}: element {index} of tensor {place.name} is NaN or infinite: train or save it again"
        )

    def _run_at(self, offset: int) -> list[TensorPlace] | None:
        index = bisect.bisect(self._runs, offset, key=lambda run: run[0].offset) - 1
        return self._runs[index] if index >= 0 and offset < _end(self._runs[index][-1]) else None


def _end(place: TensorPlace) -> int:
    return place.offset + place.num_bytes
