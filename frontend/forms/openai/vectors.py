"""Encode embeddings: floats of several widths in either byte order, and Cohere's quantized types."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ....ipc.errors import RequestError


class Float(NamedTuple):
    """A floating point format narrower than float32."""

    typecode: str  # typecode of an array of its bit patterns
    num_fraction_bits: int
    least_exponent: int  # least exponent of normal numbers
    top: int  # bit pattern for overflow: infinity, or the largest number if the format has no infinity


NARROW = {
    "float16": Float("H", 10, -14, 0x7C00),
    "bfloat16": Float("H", 7, -126, 0x7F80),
    "fp8_e4m3": Float("B", 3, -6, 0x7E),
    "fp8_e5m2": Float("B", 2, -14, 0x7C),
}


def packed(vector: array[float], dtype: str, endianness: str) -> bytes:
    """Return the numbers as bytes in `dtype`, float32 or a key of NARROW, rounded half to even. NaN and numbers beyond
    the range become `top` of the dtype, with their sign. `endianness`: little, big or native."""
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
    fraction = round(math.ldexp(abs(number), form.num_fraction_bits - exponent))  # with the leading 1
    return sign | min(((exponent - form.least_exponent) << form.num_fraction_bits) + fraction, form.top)


def _bits(vector: array[float]) -> bytes:
    """Return one bit per number, set if the number is not negative; the first of eight numbers is the highest bit of a
    byte. RequestError if their count is not a multiple of 8."""
    if len(vector) % 8:
        raise RequestError(f"embedding_types has bits of {len(vector)} numbers: give an output_dimension of 8, 16 …")
    return int("".join("01"[number >= 0] for number in vector), 2).to_bytes(len(vector) // 8, "big")


def _int8(vector: array[float]) -> Iterable[int]:
    """Yield the numbers as integers, scaled so that the largest magnitude is 127. Cosine similarity does not depend on
    the scale."""
    scale = 127 / (max(map(abs, vector)) or 1)
    return (round(number * scale) for number in vector)


COHERE_TYPES: dict[str, Callable[[array[float]], object]] = {
    "float": lambda vector: vector.tolist(),
    "int8": lambda vector: list(_int8(vector)),
    "uint8": lambda vector: [128 + number for number in _int8(vector)],
    "binary": lambda vector: [byte - 128 for byte in _bits(vector)],
    "ubinary": lambda vector: list(_bits(vector)),
    "base64": lambda vector: base64.b64encode(packed(vector, "float32", "little")).decode(),
}
