"""Cases that change from day to day: the default run takes a few of many, other ones tomorrow, the nightly run all.

The day is that of LOOM_TEST_DATE, which each run prints at its end, else today: `LOOM_TEST_DATE=2026-11-29 scripts/test
tests/core` takes the cases of that day once more.

Thousands of seeds that a run does not take are not collected either. Other cases are, since a case without a name of
its own is named by its place among all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import TypeVar

import pytest

T = TypeVar("T")

VARIABLE = "LOOM_TEST_DATE"  # no TOKENLOOM_ name: engines warn of those that they do not know
# in the environment, so that all processes of a run agree, at midnight too
DAY = date.fromisoformat(os.environ.setdefault(VARIABLE, datetime.now(UTC).date().isoformat())).toordinal()


class Run:
    """The run of this process: tests/conftest.py says whether it takes nightly tests."""

    takes_night = True


def seeds(num_today: int, num_nightly: int = 0) -> list[object]:
    """Return seeds for `parametrize`: those of the day, then more for the nightly run."""
    first = DAY * 1000
    count = num_today + (num_nightly if Run.takes_night else 0)
    return [_case(first + i, is_today=i < num_today) for i in range(count)]


def some(cases: Sequence[object], num_today: int, day: int = DAY) -> list[object]:
    """Return all cases for `parametrize`; the nightly run alone takes those that are not among the day's. These are far
    apart, and each case has its day within len(cases) / num_today days."""
    today = _places(len(cases), num_today, day)
    is_kept = Run.takes_night or not isinstance(cases, range)
    return [_case(case, is_today=i in today) for i, case in enumerate(cases) if is_kept or i in today]


def chosen(values: Sequence[T], num_today: int) -> list[T]:
    """Return the values of the day in their order, the nightly run's all: for tests that go over several at once."""
    today = _places(len(values), num_today, DAY)
    return [value for i, value in enumerate(values) if Run.takes_night or i in today]


def some_pairs(rows: Sequence[object], columns: Sequence[object], every: int) -> list[object]:
    """Return all pairs for `parametrize` of two names, as a Latin square: one of `every` columns of each row and one of
    `every` rows of each column are the day's."""
    return [
        _case((row, column), is_today=(i + j + DAY) % every == 0)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def at_night(*cases: object) -> list[object]:
    """Return cases for `parametrize` of the nightly run alone."""
    return [_case(case, is_today=False) for case in cases]


def _places(count: int, num_today: int, day: int) -> set[int]:
    """Return the places of a day's cases among `count`."""
    stride = next(step for step in range(round(0.618 * count), 2 * count + 2) if math.gcd(step, count) == 1)
    return {(day * num_today + i) * stride % count for i in range(min(num_today, count))}


def _case(case: object, *, is_today: bool) -> object:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[] if is_today else [pytest.mark.nightly])
