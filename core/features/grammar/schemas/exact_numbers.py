"""Exact numbers of a schema: the grammar library reads them as float64 and writes the bounds of ranges with int64, so
that it rounds some.

`digits_expression` keeps integers exact, as regular expressions over their digits. `narrowed` is for places where no
expression is possible: a bound is moved inwards to the next number that both types can hold, so that each answer still
conforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

EXACT = 1 << 53  # up to here float64 holds each integer
LARGEST = 9223372036854774784  # the largest float64 below 2 ** 63
OPEN_FROM = 10**18  # a range from here on needs a bound on its other side, too: the library counts digits with int64

LIMIT = 10**100  # of bounds: their expressions are as long as their digits, squared
FINITE_NUMBER = r"/-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?/"  # all are within float64
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
LOWER, UPPER = BOUNDS[:2], BOUNDS[2:]


def inexact_number(value: object) -> int | float | None:
    """Return a number in `value` (of `const` or `enum`) that the library would change; None if there is none."""
    return _find(value, lambda number: not _is_exact(number))


def infinite_number(value: object) -> float | None:
    """Return a number in a value that is infinite or not a number; None if there is none."""
    return _find(value, lambda number: isinstance(number, float) and not math.isfinite(number))


def _find(value: object, is_wanted: Callable[[int | float], bool]) -> int | float | None:
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, list):
            todo += each
        elif isinstance(each, int | float) and is_wanted(each):
            return each
    return None


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` with bounds that the library holds exactly, moved inwards."""
    if not any(is_number(schema.get(name)) and abs(schema[name]) >= EXACT for name in BOUNDS):
        return schema
    node = schema.copy()
    types = node.get("type", "number")
    is_integer = "integer" in types and "number" not in types
    for inclusive, exclusive, sign in ((*LOWER, 1), (*UPPER, -1)):
        if is_integer:  # the library adds 1 to an exclusive bound, as float64
            if node.get(exclusive) is True and is_number(node.get(inclusive)):  # of draft 4
                node[inclusive] = _inside(node[inclusive], sign)
                del node[exclusive]
            elif is_number(node.get(exclusive)):
                bounds = [_inside(node.pop(exclusive), sign), *([node[inclusive]] if inclusive in node else [])]
                node[inclusive] = max(bounds) if sign > 0 else min(bounds)
        for name in (inclusive, exclusive):
            if is_number(node.get(name)):
                node[name] = _rounded(node[name], sign)
    if any(is_number(node.get(name)) and node[name] >= OPEN_FROM for name in LOWER):
        node.setdefault("maximum", LARGEST)
    if any(is_number(node.get(name)) and node[name] <= -OPEN_FROM for name in UPPER):
        node.setdefault("minimum", -LARGEST)
    return node


def integer_bounds(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the smallest and the largest integer within a schema's bounds, limited to numbers below LIMIT; None for a
    side without a bound."""
    low = [_first_integer(bound, 1, is_exclusive) for bound, is_exclusive in _bounds(schema, *LOWER)]
    high = [_first_integer(bound, -1, is_exclusive) for bound, is_exclusive in _bounds(schema, *UPPER)]
    return max(1 - LIMIT, *low) if low else None, min(LIMIT - 1, *high) if high else None


def decimal_bounds(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return a schema's bounds cut to numbers below 2^53, the only ones that float64 holds with decimals; None if no
    such number is within the bounds. A side without a bound stays without one."""
    bounds: dict[str, Any] = {}
    for names, sign in ((LOWER, 1), (UPPER, -1)):
        for bound, is_exclusive in _bounds(schema, *names):
            if bound * sign >= EXACT:
                return None
            if bound * sign > -EXACT:
                bounds[names[is_exclusive]] = bound
            else:
                bounds[names[0]] = -EXACT * sign
    return bounds


def digits_expression(low: int | None, high: int | None) -> str:
    """Return a terminal of Lark for the integers from `low` to `high` (None: no bound); "" if there is none. Its length
    grows with the square of the number of digits."""
    if low is not None and (low >= LIMIT or (high is not None and low > high)):
        return ""
    if high is not None and high <= -LIMIT:
        return ""
    parts = []
    if high is None or high >= 0:
        parts.append(_digits(max(low or 0, 0), high))
    if low is None or low < 0:
        parts.append('"-" ' + _digits(1 if high is None else max(1, -high), None if low is None else -low))
    return " | ".join(parts)


def _digits(low: int, high: int | None) -> str:
    """Return a terminal of Lark for the natural numbers from `low` to `high`. Its first half has no leading zeros."""
    text = str(low)
    more = [f"{text[:i]}[{int(text[i]) + 1}-9][0-9]{{{len(text) - i - 1}}}" for i in range(len(text)) if text[i] < "9"]
    at_least = "|".join([text, *more, f"[1-9][0-9]{{{len(text)},}}"])
    if high is None:
        return f"/{at_least}/"
    text = str(high)
    less = [f"{text[:i]}[0-{int(text[i]) - 1}][0-9]{{{len(text) - i - 1}}}" for i in range(len(text)) if text[i] > "0"]
    return f"(/{at_least}/ & /{'|'.join([text, *less, f'[0-9]{{0,{len(text) - 1}}}'])}/)"


def _bounds(schema: dict[str, Any], inclusive: str, exclusive: str) -> Iterator[tuple[int | float, bool]]:
    """Yield the bounds of one side, and whether they are exclusive."""
    if is_number(schema.get(inclusive)):
        yield schema[inclusive], schema.get(exclusive) is True  # of draft 4
    if is_number(schema.get(exclusive)):
        yield schema[exclusive], True


def _first_integer(bound: int | float, sign: int, is_exclusive: bool) -> int:
    """Return the first integer inside a bound. sign: 1 for a lower one, -1 for an upper one. A large float may be read
    as its digits or as a power of 2: the integer is inside both."""
    readings: list[int | float | Decimal] = [bound]
    if isinstance(bound, float) and abs(bound) >= EXACT:
        readings.append(Decimal(repr(bound)))
    if is_exclusive:
        found = [_inside(each, sign) for each in readings]
    else:
        found = [math.ceil(each) if sign > 0 else math.floor(each) for each in readings]
    return max(found) if sign > 0 else min(found)


def _inside(bound: int | float | Decimal, sign: int) -> int:
    """Return the first integer inside an exclusive bound. sign: 1 for a lower one, -1 for an upper one."""
    return math.floor(bound) + 1 if sign > 0 else math.ceil(bound) - 1


def _rounded(bound: int | float, sign: int) -> int | float:
    """Return the bound, or the next number inside it that float64 and int64 can hold, also where the library reads its
    fewest digits: 2^62 + 1024 as 4611686018427389000."""
    outer = -LARGEST * sign
    if (bound - outer) * sign < 0:
        return outer
    if isinstance(bound, float) or abs(bound) > LARGEST:
        return bound
    rounded = float(bound)
    while (int(rounded) - bound) * sign < 0 or (Decimal(repr(rounded)) - bound) * sign < 0:
        rounded = math.nextafter(rounded, math.inf * sign)
    return int(rounded)


def is_number(value: object) -> bool:
    """Return whether a value is a JSON number: a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(value: int | float) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if abs(value) <= LARGEST:
        return int(float(value)) == value
    return value.bit_length() < 1000 and Decimal(repr(float(value))) == value  # written with the fewest digits
