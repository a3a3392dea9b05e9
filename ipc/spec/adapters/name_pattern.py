"""NamePattern: a regular expression of adapter_config.json, matched against the paths of modules in bounded time.

PEFT matches the keys of rank_pattern and alpha_pattern with Python's `re`, which some patterns keep busy for hours.
This matcher follows all ways through a pattern at once: a set of places in the name is the bits of an int. It refuses
look-around, back references and other rare syntax, and matches the rest as `re` does.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import TypeAlias

MAX_LENGTH = 500
MAX_DEPTH = 20
MAX_STEPS = 4_000_000  # two seconds; the most experts in one file and a few patterns need one million

ALPHABET = string.ascii_letters + string.digits + "_.-"  # of names
CLASSES = {"d": string.digits, "w": string.ascii_letters + string.digits + "_", "s": string.whitespace}
COUNT = re.compile(r"[*+?]|\{(\d+)\}|\{(\d*),(\d*)\}")
LOWEST_AND_HIGHEST: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class PatternError(ValueError):
    """A pattern is no regular expression, or one that is not supported; or matches take too many steps."""


class StepBudget:
    """The steps that matches may still take."""

    def __init__(self, num_steps: int = MAX_STEPS) -> None:
        self._num_steps = self._left = num_steps

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise PatternError(f"its matches take more than {self._num_steps} steps")


class Name:
    """A name, with the places of its characters. Place i is before character i."""

    def __init__(self, text: str, budget: StepBudget) -> None:
        self.spend = budget.spend
        self.end = 1 << len(text)
        self.chars: dict[str, int] = {}
        for place, char in enumerate(text):
            self.chars[char] = self.chars.get(char, 0) | 1 << place
        self._before: dict[frozenset[str], int] = {}

    def behind(self, places: int, members: frozenset[str]) -> int:
        """Return the places behind these characters, of those that begin at `places`."""
        before = self._before.get(members)
        if before is None:
            before = self._before[members] = sum(there for char, there in self.chars.items() if char in members)
        return (places & before) << 1


Matcher: TypeAlias = Callable[[Name, int], int]  # from the places where it may begin to those where it may end


class NamePattern:
    """A parsed pattern."""

    def __init__(self, text: str) -> None:
        """PatternError if the pattern cannot be used."""
        if len(text) > MAX_LENGTH:
            raise PatternError(f"it has {len(text)} characters, at most {MAX_LENGTH} are read")
        parser = _Parser(text)
        self._match = parser.alternatives(0)
        if parser.rest:
            raise PatternError(f"it has an unexpected {parser.rest[0]!r}")

    def matches(self, name: Name) -> bool:
        """Whether the pattern matches all of the name, or the rest behind one of its dots."""
        starts = 1 | name.chars.get(".", 0) << 1
        return bool(self._match(name, starts) & name.end)


class _Parser:
    """Makes a matcher of each part of a pattern, from its front to its end."""

    def __init__(self, text: str) -> None:
        self.rest = text

    def alternatives(self, depth: int) -> Matcher:
        if depth > MAX_DEPTH:
            raise PatternError(f"it nests more than {MAX_DEPTH} groups")
        choices: list[list[Matcher]] = [[]]
        while self.rest and self.rest[0] != ")":
            if self._take("|"):
                choices.append([])
            else:
                choices[-1].append(self._repeated(self._atom(depth)))

        def match(name: Name, places: int) -> int:
            ends = 0
            for parts in choices:
                reached = places
                for part in parts:
                    name.spend()
                    reached = part(name, reached)
                ends |= reached
            return ends

        return match

    def _repeated(self, item: Matcher) -> Matcher:
        count = COUNT.match(self.rest)
        if count is None:
            return item
        self.rest = self.rest[count.end() :]
        exact, low, high = count.groups()
        lowest, highest = LOWEST_AND_HIGHEST.get(
            count[0], (int(exact or low or 0), int(exact or high) if exact or high else None)
        )
        if highest is not None and highest < lowest:
            raise PatternError(f"{count[0]} is no range")
        self._take("?")  # lazy: the same set of matches
        if COUNT.match(self.rest):
            raise PatternError(f"it has {self.rest[0]!r} behind {count[0]}")

        def match(name: Name, places: int) -> int:
            ends, num = 0 if lowest else places, 0
            while places and (highest is None or num < highest):
                name.spend()
                num, before, places = num + 1, places, item(name, places)
                if num < lowest and places != before:  # equal places stay equal
                    continue
                is_new, ends = bool(places & ~ends), ends | places
                if places == before or not is_new:
                    break
            return ends

        return match

    def _atom(self, depth: int) -> Matcher:
        char = self._next()
        if char == "(":
            if self._take("?") and not self._take(":"):
                raise PatternError("look-around, flags and named groups are not supported")
            inner = self.alternatives(depth + 1)
            if not self._take(")"):
                raise PatternError("a group is not closed")
            return inner
        if char == "^":
            return lambda name, places: places & 1
        if char == "$":
            return lambda name, places: places & name.end
        if char in "*+?":
            raise PatternError(f"{char!r} has nothing to repeat")
        members = frozenset(ALPHABET if char == "." else self._set() if char == "[" else self._members(char))
        return lambda name, places: name.behind(places, members)

    def _members(self, char: str) -> str:
        """Return the characters that a character stands for, which may be a backslash before another."""
        if char != "\\":
            return char
        char = self._next()
        inside = CLASSES.get(char.lower())
        if inside is not None:
            return inside if char.islower() else "".join(set(ALPHABET) - set(inside))
        if char.isalnum():
            raise PatternError(f"\\{char} is not supported")
        return char

    def _set(self) -> set[str]:
        """Return the characters of a set in brackets, of which the first is read."""
        is_inverse, members, is_first = self._take("^"), set[str](), True
        while is_first or not self._take("]"):
            is_first, found = False, self._members(self._next())
            if self.rest[:1] == "-" and self.rest[1:2] != "]":
                self._next()
                last = self._members(self._next())
                if len(found) != 1 or len(last) != 1 or last < found:
                    raise PatternError("a set has an invalid range of characters")
                found = "".join(map(chr, range(ord(found), min(ord(last), 127) + 1)))
            members |= set(found)
        return set(ALPHABET) - members if is_inverse else members

    def _next(self) -> str:
        if not self.rest:
            raise PatternError("it ends too early")
        char, self.rest = self.rest[0], self.rest[1:]
        return char

    def _take(self, text: str) -> bool:
        """Whether `text` comes next; if so, it is read."""
        is_next = self.rest.startswith(text)
        self.rest = self.rest.removeprefix(text)
        return is_next
