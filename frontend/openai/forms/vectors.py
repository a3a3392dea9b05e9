"""Vectors as callers ask for them: floats of several widths in either order of bytes, and Cohere's quantized ones."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ....ipc.errors import RequestError


class Float(NamedTuple):
    """A form of floating point numbers narrower than float32."""

    typecode: str  # of an array of its codes
    num_fraction_bits: int
    least_exponent: int  # of normal numbers
    top: int  # the code of all that is too large: infinity, or the largest number where there is none


NARROW = {
    "float16": Float("H", 10, -14, 0x7C00),
    "bfloat16": Float("H", 7, -126, 0x7F80),
    "fp8_e4m3": Float("B", 3, -6, 0x7E),
    "fp8_e5m2": Float("B", 2, -14, 0x7C),
}


def packed(vector: array[float], dtype: str, endianness: str) -> bytes:
    """The numbers as bytes, rounded to the nearest of `dtype`, which may be float32, and half to even."""
    form = NARROW.get(dtype)
    codes = array("f", vector) if form is None else array(form.typecode, (_code(number, form) for number in vector))
    if endianness not in ("native", sys.byteorder):
        codes.byteswap()
    return codes.tobytes()


def _code(number: float, form: Float) -> int:
    sign = (math.copysign(1, number) < 0) << (8 * array(form.typecode).itemsize - 1)
    if not number or not math.isfinite(number):
        return sign | (form.top if number else 0)
    exponent = max(math.frexp(number)[1] - 1, form.least_exponent)
    fraction = round(math.ldexp(abs(number), form.num_fraction_bits - exponent))  # the leading 1 included
    return sign | min(((exponent - form.least_exponent) << form.num_fraction_bits) + fraction, form.top)


def _bits(vector: array[float]) -> bytes:
    """One bit a number, of eight the first in the highest: whether it is not negative."""
    if len(vector) % 8:
        raise RequestError(f"embedding_types has bits of {len(vector)} numbers: give an output_dimension of 8, 16 …")
    return int("".join("01"[number >= 0] for number in vector), 2).to_bytes(len(vector) // 8, "big")


def _steps(vector: array[float]) -> Iterable[int]:
    """-127 to 127, the number that is farthest from 0: what is compared by its angle loses nothing by the scale."""
    scale = 127 / (max(map(abs, vector)) or 1)
    return (round(number * scale) for number in vector)


COHERE_TYPES: dict[str, Callable[[array[float]], object]] = {
    "float": lambda vector: vector.tolist(),
    "int8": lambda vector: list(_steps(vector)),
    "uint8": lambda vector: [128 + step for step in _steps(vector)],
    "binary": lambda vector: [byte - 128 for byte in _bits(vector)],
    "ubinary": lambda vector: list(_bits(vector)),
    "base64": lambda vector: base64.b64encode(packed(vector, "float32", "little")).decode(),
}
