"""Branches of a pattern that is looked for in a text: one for each way through its groups with anchors.

The library's expressions have no anchors: they match whole texts. So an anchor must stand at the edge of a branch,
where it leaves out the text that may otherwise come before or behind.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .....ipc.errors import RequestError

MAX_BRANCHES = 64
_ATOM = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]?|[()|^$/\n]|[^\\\[()|^$/\n]++", re.DOTALL)
_ANCHORS = {r"\A": "^", r"\Z": "$", r"\z": "$"}
_NAMED = re.compile(r"\?(?::|P?<\w++>)")
_NO_CHARACTER = (r"\b", r"\B", "(", ")")

Branch = tuple[str, ...]  # atoms


class Part(NamedTuple):
    """Branches up to the bracket or the end behind them, `at` the place of the next atom."""

    branches: list[Branch]
    at: int


def found_anywhere(pattern: str) -> str:
    """Return an expression for whole texts in which a pattern is found somewhere, unless its anchors say otherwise.
    RequestError for anchors within repeated groups or between other texts."""
    atoms = [_ANCHORS.get(found[0], found[0]) for found in _ATOM.finditer(pattern)]
    branches = _Reader(pattern, atoms).branches()
    found = [each for branch in branches if (each := _anchored(pattern, branch)) is not None]
    if not found:
        raise RequestError(f"structured_outputs.json: no text matches the pattern {pattern!r:.80}: change its anchors")
    return "|".join(dict.fromkeys(found))


class _Reader:
    """Reader of one pattern."""

    def __init__(self, pattern: str, atoms: list[str]) -> None:
        self._pattern, self._atoms = pattern, atoms

    def branches(self) -> list[Branch]:
        part = self._read(0)
        if part.at < len(self._atoms):  # a bracket without its opening, which the library refuses
            return [tuple(self._atoms)]
        return part.branches

    def _read(self, at: int) -> Part:
        """Read branches from an atom on."""
        done: list[Branch] = []
        now: list[Branch] = [()]
        while at < len(self._atoms) and self._atoms[at] != ")":
            atom = self._atoms[at]
            at += 1
            if atom == "|":
                done += now
                now = [()]
                continue
            ways: list[Branch] = [(atom,)]
            if atom == "(":
                begin = at - 1
                inner = self._read(at)
                at = inner.at + 1
                ways = [tuple(self._atoms[begin:at])]
                if any(anchor in way for way in inner.branches for anchor in "^$"):
                    ways = self._ways(begin, inner, at)
            if len(now) * len(ways) > MAX_BRANCHES:
                self._refuse("has too many branches with anchors")
            now = [(*left, *right) for left in now for right in ways]
        return Part(done + now, at)

    def _ways(self, begin: int, inner: Part, at: int) -> list[Branch]:
        """Return the ways through a group with anchors, from `begin` to before `at`."""
        opening = self._atoms[begin + 1]
        named = _NAMED.match(opening)
        if opening.startswith("?") and named is None:
            self._refuse("has an anchor in a group that looks ahead or changes flags")
        ways = inner.branches
        if named is not None:
            ways = [(first[named.end() :], *rest) for first, *rest in ways[:1]] + ways[1:]
        following = self._atoms[at] if at < len(self._atoms) else ""
        if following.startswith(("*", "+", "{")):
            self._refuse("has an anchor in a group that is repeated")
        if following.startswith("?"):
            self._atoms[at] = following[1:].removeprefix("?")
            ways = [*ways, ()]
        return [tuple(filter(None, way)) for way in ways]

    def _refuse(self, what: str) -> None:
        raise RequestError(
            f"structured_outputs.json: pattern {self._pattern!r:.80} {what}, which texts of this model's calls cannot "
            "be limited by: write it outside of the group"
        )


def _anchored(pattern: str, branch: Branch) -> str | None:
    """Return an expression for a branch, with any text where no anchor stands; None if it matches no text."""
    begin, end = 0, len(branch)
    while begin < end and branch[begin] == "^":
        begin += 1
    while end > begin and branch[end - 1] == "$":
        end -= 1
    body = branch[begin:end]
    for place, atom in enumerate(body):
        if atom in ("^", "$"):
            if _takes_character(body, place):
                return None
            raise RequestError(
                f"structured_outputs.json: pattern {pattern!r:.80} has {atom} between other texts, which texts of this "
                "model's calls cannot be limited by: write it at an edge"
            )
    before = "" if begin else "(?s:.*)"
    after = "" if end < len(branch) else "(?s:.*)"
    return f"{before}(?:{''.join(map(escaped, body))}){after}"


def _takes_character(body: Branch, place: int) -> bool:
    """Return whether a character certainly stands before the ^, or behind the $, at a place."""
    if body[place] == "^":
        neighbour = body[place - 1]
        return neighbour not in _NO_CHARACTER and neighbour[-1:] not in "?*}^$"
    neighbour = "".join(body[place + 1 : place + 2])
    rest = neighbour[1:] + "".join(body[place + 2 : place + 3])
    if neighbour.startswith(("[", "\\")):
        rest = "".join(body[place + 2 : place + 3])
    return neighbour not in _NO_CHARACTER and neighbour[:1] not in "^$" and rest[:1] not in ("?", "*", "{")


def escaped(expression: str) -> str:
    """Return an expression for use between slashes."""
    return re.sub(
        r"(\\.)|/|\n", lambda found: found[1] or {"/": r"\/", "\n": r"\n"}[found[0]], expression, flags=re.DOTALL
    )
