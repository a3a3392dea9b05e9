"""Checks that an adapter's numbers are finite, by their bytes and without numpy.

A float is infinite or NaN if all bits of its exponent are set. They are in its last two bytes, which are compared for a
whole piece of the file at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import RequestError
from .tensor_header import SIZE_BY_DTYPE, TensorPlace

PIECE_BYTES = 1 << 20  # holds the interpreter for about a millisecond


class _Exponent(NamedTuple):
    """Tables that map a byte to 1 if its bits of the exponent are all set, else to 0."""

    last: bytes
    before: bytes


def _table(mask: int) -> bytes:
    return bytes(int(byte & mask == mask) for byte in range(256))


_EXPONENTS = {
    "F64": _Exponent(_table(0x7F), _table(0xF0)),
    "F32": _Exponent(_table(0x7F), _table(0x80)),
    "BF16": _Exponent(_table(0x7F), _table(0x80)),
    "F16": _Exponent(_table(0x7C), _table(0x00)),
}


def refuse_not_finite(path: Path, places: Iterable[TensorPlace]) -> None:
    """Read these tensors of the file; RequestError if one has a value that is infinite or not a number."""
    try:
        with path.open("rb") as file:
            for place in places:
                file.seek(place.offset)
                if not _is_finite(file, place):
                    raise RequestError(
                        f"{path}: tensor {place.name} has values that are infinite or not numbers: train the adapter "
                        "again, perhaps with a lower learning rate"
                    )
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}): check its permissions") from None


def _is_finite(file: BinaryIO, place: TensorPlace) -> bool:
    size, left = SIZE_BY_DTYPE[place.dtype], place.num_bytes
    last, before = _EXPONENTS[place.dtype]
    while left and (piece := file.read(min(left, PIECE_BYTES))):
        left -= len(piece)
        full = piece[size - 1 :: size].translate(last)
        if 1 in full and int.from_bytes(full) & int.from_bytes(piece[size - 2 :: size].translate(before)):
            return False
    return True
