"""Replaces numbers of a schema that the grammar library would round: it reads all of them as float64, and writes the
bounds of ranges with int64.

A bound is moved inwards to the next number that both can hold, so that each answer still conforms, and `const` and
`enum` with a number that no float64 holds are for the caller to refuse: an id that is off by one would name another
object.

llguidance 1.9 has no way around: `const` and `enum` become a range from n to n, in float64; `multipleOf` is 32 bits
wide; a pattern stands inside quotes; and a schema cannot refer to a Lark rule. Rules can hold schemas, so only a second
translator, of each object around such a number to Lark, would serve them.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

EXACT = 1 << 53  # up to here float64 holds each integer
LARGEST = 9223372036854774784  # the largest float64 below 2 ** 63
OPEN_FROM = 10**18  # a range from here on needs a bound on its other side, too: the library counts digits with int64

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LOWER, _UPPER = BOUNDS[:2], BOUNDS[2:]


def inexact_number(value: object, *, is_bound: bool = False) -> int | float | None:
    """Return a number in a value of `const` or `enum` that the library would change; None if there is none.
    is_bound: it is a bound, which may be moved if it is finite."""
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, list):
            todo += each
        elif isinstance(each, int | float) and not (_is_exact(each) or (is_bound and isinstance(each, int))):
            return each
    return None


def exact_bounds(node: dict[str, Any]) -> None:
    """Move the bounds of `node` inwards to numbers that the library holds exactly."""
    given = [name for name in (*_LOWER, *_UPPER) if _is_number(node.get(name))]
    if all(_is_exact(node[name]) and abs(node[name]) < EXACT for name in given):
        return
    for inclusive, exclusive, sign in ((*_LOWER, 1), (*_UPPER, -1)):
        if node.get("type") == "integer":  # the library adds 1 to an exclusive bound, as float64
            if node.get(exclusive) is True and _is_number(node.get(inclusive)):  # of draft 4
                node[inclusive] = _inside(node[inclusive], sign)
                del node[exclusive]
            elif _is_number(node.get(exclusive)):
                bounds = [_inside(node.pop(exclusive), sign), *([node[inclusive]] if inclusive in node else [])]
                node[inclusive] = max(bounds) if sign > 0 else min(bounds)
        for name in (inclusive, exclusive):
            if _is_number(node.get(name)):
                node[name] = _rounded(node[name], sign)
    if any(_is_number(node.get(name)) and node[name] >= OPEN_FROM for name in _LOWER):
        node.setdefault("maximum", LARGEST)
    if any(_is_number(node.get(name)) and node[name] <= -OPEN_FROM for name in _UPPER):
        node.setdefault("minimum", -LARGEST)


def _inside(bound: int | float, sign: int) -> int:
    """Return the first integer inside an exclusive bound. sign: 1 for a lower one, -1 for an upper one."""
    if math.isinf(bound):
        return -LARGEST if bound < 0 else LARGEST
    return math.floor(bound) + 1 if sign > 0 else math.ceil(bound) - 1


def _rounded(bound: int | float, sign: int) -> int | float:
    """Return the bound, or the next number inside it that float64 and int64 can hold."""
    outer = -LARGEST * sign
    if (bound - outer) * sign < 0:
        return outer
    if isinstance(bound, float) or abs(bound) > LARGEST:
        return bound
    rounded = int(float(bound))
    if (rounded - bound) * sign < 0:
        rounded = int(math.nextafter(float(bound), math.inf * sign))
    return rounded


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(value: int | float) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if abs(value) <= LARGEST:
        return int(float(value)) == value
    return value.bit_length() < 1000 and Decimal(repr(float(value))) == value  # written with the fewest digits
