"""PatternTable: rank_pattern or alpha_pattern of adapter_config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

from .name_pattern import NamePattern, PatternError, StepBudget
from .tensor_header import shown

V = TypeVar("V")

MAX_PATTERNS = 100
PLAIN = re.compile(r"[\w.-]+", re.ASCII)  # a plain path, not a regular expression: its dots match only dots


class PatternTable(Generic[V]):
    """Values by pattern. A pattern is a module's path, the end of a path after a dot, or a regular expression for
    either. The first pattern that matches counts, as in PEFT."""

    def __init__(self, values: Mapping[str, V], budget: StepBudget) -> None:
        """`values`: by pattern, in the file's order. PatternError if a pattern cannot be used."""
        self._budget = budget
        self._plain: dict[str, tuple[int, V]] = {}
        patterns = list[tuple[int, str, V]]()
        for order, (key, value) in enumerate(values.items()):
            if PLAIN.fullmatch(key):
                self._plain[key] = (order, value)
            else:
                patterns.append((order, key, value))
        if len(patterns) > MAX_PATTERNS:
            raise PatternError(f"{len(patterns)} keys are regular expressions, at most {MAX_PATTERNS} may be")
        self._patterns = [(order, _pattern_of(key), value) for order, key, value in patterns]

    def find(self, path: str) -> V | None:
        """Return the value for the module with this path; None if no pattern matches. PatternError if the budget is
        spent."""
        ends = [path, *(path[place + 1 :] for place, char in enumerate(path) if char == ".")]
        found = [self._plain[end] for end in ends if end in self._plain]
        found += ((order, value) for order, pattern, value in self._patterns if pattern.matches(path, self._budget))
        return min(found, key=lambda each: each[0])[1] if found else None


def _pattern_of(key: str) -> NamePattern:
    try:
        return NamePattern(key)
    except PatternError as error:
        raise PatternError(f"{shown(key)}: {error}", error.mend) from None
