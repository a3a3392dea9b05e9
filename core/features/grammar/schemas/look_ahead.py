"""Replaces a pattern that starts with look-aheads by several patterns without any, all of which must match.

(?=X)Y      X at the start, and Y                    passwords: ^(?=.*[A-Z])(?=.*\\d).{8,}$
(?![c]*$)Y  a character that is none of c, and Y     Decimal of pydantic 2: ^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$
(?!$)Y      any character, and Y
(?!.*[c])Y  no character of c anywhere, and Y
"""

from __future__ import annotations

import re
from collections.abc import Callable

_CLASS = r"(\[(?!\^)(?:[^\]\\]|\\.)+\]|\\[dws])"
_REFUSALS: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = (
    (re.compile(rf"\^?{_CLASS}\*\$"), lambda found: _inverse(found)),
    (re.compile(r"\^?()\$"), lambda _: r"[\s\S]"),
    (re.compile(rf"\.\*{_CLASS}"), lambda found: rf"^{_inverse(found)}*$"),
)
# pydantic's Decimal of at most N digits: those before and after the point count together
_DIGITS = re.compile(r"\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d\{0,\d+\}\\\.\\d\{0,\d+\}")
_ATOM = re.compile(
    r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]?|[()]", re.DOTALL
)  # matches sets without an end, too, to read them once
MAX_DIGITS = 100
MAX_LOOK_AHEADS = 32


def without_look_ahead(pattern: str) -> list[str]:
    """Return patterns that together match the same texts as `pattern`: the pattern itself, if it has no look-ahead or
    one that cannot be replaced. Of pydantic's decimals only those of up to MAX_DIGITS digits match."""
    if pattern.count("(?") > MAX_LOOK_AHEADS:
        return [pattern]
    rest = _DIGITS.sub(lambda found: _digits(min(int(found[1][:9]) - 1, MAX_DIGITS)), pattern)
    more: list[str] = []
    while (opening := re.match(r"\^?\(\?[=!]", rest)) is not None:
        end = _closing(rest, opening.end())
        if end < 0 or not rest.startswith("^"):
            return [pattern]
        inside = rest[opening.end() : end]
        if opening[0].endswith("="):
            more.append(f"^(?:{inside.removeprefix('^')})")
        else:
            said = next((say(found[1]) for form, say in _REFUSALS if (found := form.fullmatch(inside))), None)
            if said is None:
                return [pattern]
            more.append(said)
        rest = "^" + rest[end + 1 :]
    return [rest, *more]


def _inverse(characters: str) -> str:
    return f"[^{characters[1:]}" if characters.startswith("[") else characters.upper()


def _digits(count: int) -> str:
    return "(?:" + "|".join(rf"\d{{{before}}}\.\d{{0,{count - before}}}" for before in range(count + 1)) + ")"


def _closing(pattern: str, start: int) -> int:
    """Return the index of the bracket that closes the group around `start`; -1 if there is none."""
    depth = 1
    for found in _ATOM.finditer(pattern, start):
        depth += (found[0] == "(") - (found[0] == ")")
        if not depth:
            return found.start()
    return -1
