"""PatternTable: rank_pattern or alpha_pattern of adapter_config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

from .name_pattern import Name, NamePattern, PatternError, StepBudget

V = TypeVar("V")

MAX_PATTERNS = 100
PLAIN = re.compile(r"[\w.-]+", re.ASCII)  # a path; its dots stand for themselves


class PatternTable(Generic[V]):
    """Values by pattern: a path of a module, or its end behind a dot, or a regular expression for either. The first
    pattern that matches counts, as in PEFT."""

    def __init__(self, values: Mapping[str, V], budget: StepBudget) -> None:
        """PatternError if a pattern cannot be used."""
        self._budget = budget
        self._plain: dict[str, tuple[int, V]] = {}
        self._patterns: list[tuple[int, NamePattern, V]] = []
        for order, (key, value) in enumerate(values.items()):
            if PLAIN.fullmatch(key):
                self._plain[key] = (order, value)
            else:
                self._patterns.append((order, NamePattern(key), value))
        if len(self._patterns) > MAX_PATTERNS:
            raise PatternError(
                f"{len(self._patterns)} of its keys are regular expressions, at most {MAX_PATTERNS} may be"
            )

    def find(self, path: str) -> V | None:
        """Return the value for the module with this path; None: no pattern matches."""
        ends = [path, *(path[place + 1 :] for place, char in enumerate(path) if char == ".")]
        found = [self._plain[end] for end in ends if end in self._plain]
        if self._patterns:
            subject = Name(path, self._budget)
            found += ((order, value) for order, pattern, value in self._patterns if pattern.matches(subject))
        return min(found, key=lambda each: each[0])[1] if found else None
