"""Derives from a regular expression the texts on which it may take long: many repetitions of a part, and then no match.

A text is a head, a unit that is repeated, and a tail. Heads lead into each repeat of the expression; units are texts
that the repeat takes, and all pairs of characters that the expression knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

TAILS = ("", "\0", "!")  # the end of the text, and characters that few expressions take
ALPHABET = ("a", "0", " ", "\n", '"', "\\", "!", "é")
MOST_CHARACTERS = 8  # of an expression's own, in pairs
CATEGORIES = {
    codes.CATEGORY_DIGIT: "0",
    codes.CATEGORY_SPACE: " ",
    codes.CATEGORY_WORD: "a",
    codes.CATEGORY_NOT_DIGIT: "a",
    codes.CATEGORY_NOT_SPACE: "a",
    codes.CATEGORY_NOT_WORD: " ",
}


class Hostile(NamedTuple):
    """A text of any length."""

    head: str
    unit: str
    tail: str = ""

    def text(self, num_characters: int) -> str:
        return self.head + self.unit * max(1, num_characters // len(self.unit)) + self.tail


def hostile_texts(pattern: re.Pattern[Any]) -> Iterator[Hostile]:
    """Yield texts for an expression, each once."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    tree = parser.parse(source, pattern.flags & ~re.UNICODE)
    seen = set[Hostile]()
    for head, unit in [*_repeats(tree, ""), *(("", "".join(each)) for each in _pairs(tree))]:
        for tail in TAILS:
            hostile = Hostile(head, unit, tail)
            if unit and hostile not in seen:
                seen.add(hostile)
                yield hostile


def _pairs(tree: Any) -> Iterator[tuple[str, ...]]:
    known = list(dict.fromkeys(character for text in _characters(tree) for character in text))[:MOST_CHARACTERS]
    known += [each for each in ALPHABET if each not in known]
    yield from product(known, repeat=1)
    yield from product(known[: MOST_CHARACTERS + 2], repeat=2)


def _characters(tree: Any) -> Iterator[str]:
    """Yield the characters that an expression names, and one of each class."""
    for code, value in tree:
        if code in (codes.LITERAL, codes.IN, codes.NOT_LITERAL):
            yield from _samples([(code, value)])
        for inner in _inside(code, value):
            yield from _characters(inner)


def _repeats(tree: Any, head: str) -> Iterator[tuple[str, str]]:
    """Yield for each repeat the text before it, and texts that it takes once; and both as a unit, which begins anew."""
    for code, value in tree:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT) and value[1] > 16:
            for unit in _samples(value[2]):
                yield head, unit
                yield "", head + unit
        for inner in _inside(code, value):
            yield from _repeats(inner, head)
        head += next(iter(_samples([(code, value)])), "")


def _inside(code: Any, value: Any) -> Iterable[Any]:
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        return [value[2]]
    if code is codes.SUBPATTERN:
        return [value[3]]
    if code is codes.BRANCH:
        return list(value[1])
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return [value[1]]
    return []


def _samples(tree: Any) -> list[str]:
    """Return a few texts that the expression takes, each with another of its alternatives."""
    texts = [""]
    for code, value in tree:
        parts = _one(code, value)
        texts = [a + b for a, b in product(texts, parts)][:6] if parts else texts
    return texts


def _one(code: Any, value: Any) -> list[str]:
    if code is codes.LITERAL:
        return [chr(value)]
    if code in (codes.ANY, codes.NOT_LITERAL):
        return ["a" if value != ord("a") else "b"]
    if code is codes.IN:
        return _of_class(value)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        return [each * max(1, value[0]) for each in _samples(value[2])]
    if code is codes.SUBPATTERN:
        return _samples(value[3])
    if code is codes.BRANCH:
        return [each for branch in value[1] for each in _samples(branch)[:3]]
    return []


def _of_class(items: Any) -> list[str]:
    if items[0][0] is codes.NEGATE:
        excluded = set(_of_class(items[1:])) if len(items) > 1 else set()
        return [each for each in ALPHABET if each not in excluded][:3]
    found: list[str] = []
    for code, value in items:
        if code is codes.LITERAL:
            found.append(chr(value))
        elif code is codes.RANGE:
            found.append(chr(value[0]))
        elif code is codes.CATEGORY:
            found.append(CATEGORIES[value])
    return found[:4]
