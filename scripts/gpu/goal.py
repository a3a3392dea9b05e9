"""Goals of the figures that scripts/gpu_check measures: a bound of a column in the rows of some cases. Standard library
only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A bound of `column` in the rows of cases that begin with `case`."""

    case: str
    column: str
    least: float | None = None
    most: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    @property
    def words(self) -> str:
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"


def with_goals(row: dict[str, Any], goals: Sequence[Goal]) -> dict[str, Any]:
    """Return the row with `goals`, those of its case and columns with their values, and `is_met`, all of them. A row
    without any is returned as it is."""
    held = [goal for goal in goals if row["case"].startswith(goal.case) and goal.column in row]
    if not held:
        return row
    found = [
        {"column": goal.column, "limit": goal.words, "value": row[goal.column], "is_met": goal.is_met(row[goal.column])}
        for goal in held
    ]
    return {**row, "goals": found, "is_met": all(goal["is_met"] for goal in found)}
