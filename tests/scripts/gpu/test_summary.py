"""The summary and the goals of scripts/gpu_check: all that a reader asks, marked in a rehearsal."""

from __future__ import annotations

import pytest

from tokenloom.scripts.gpu import engines, goals
from tokenloom.scripts.gpu.goal import Goal, with_goals
from tokenloom.scripts.gpu.results import Results, Row
from tokenloom.scripts.gpu.stages import Stage
from tokenloom.scripts.gpu.summary import summary
from tokenloom.tests.scripts.gpu.test_check import FACTS

CHAINED = """\
a.py:1: in take
E   _queue.Empty

During handling of the above exception, another exception occurred:
b.py:2: in look
E   KeyError: 'last'
"""
STAGE = Stage("8b", "large", 100, 200)


@pytest.fixture
def measured() -> Results:
    results = Results({**FACTS, "commit": "c1"})
    rows: list[Row] = [
        {
            "case": "8b: one row",
            "goals": [
                {"column": "share_of_roofline", "limit": "≥ 0.85", "value": 0.9, "is_met": True},
                {"column": "idle", "limit": "≤ 0.01", "value": 0.05, "is_met": False},
            ],
        },
        {"case": "8b: memory", "off_by": 0.01, "failed_before": "ValueError: full"},
        {"case": "x", "error": "Traceback\n  ValueError: bad | worse"},
        {"case": "z", "error": CHAINED},
        {"case": "y", "not_measured": "takes 2 devices"},
    ]
    results.record("8b", [row["case"] for row in rows], rows, "c1")
    results.end("8b", {"seconds": 12})
    return results


def test_the_summary_has_all_that_a_reader_asks(measured: Results) -> None:
    text = summary([STAGE], measured, "Next: do it.")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["8b: one row", "share_of_roofline", "≥ 0.85", "0.9", "yes"] in lines
    assert ["8b: one row", "idle", "≤ 0.01", "0.05", "**no**"] in lines
    assert ["8b", "failed", "2", "2", "1", "0", "12", "100"] in lines
    assert "1 of 2 met" in text and "ValueError: bad" in text and "takes 2 devices: y" in text
    assert "`8b: memory`, **passed at another try**: ValueError: full" in text
    assert "- 8b: `z`: KeyError: 'last'" in text and "Empty" not in text
    assert text.endswith("Next: do it.\n") and "rehearsal" not in text


def test_a_row_is_held_to_the_goals_of_its_case_and_columns() -> None:
    goals = (
        Goal("8b: one", "share", least=0.85),
        Goal("8b: one", "idle", most=0.01),
        Goal("8b: other", "share", most=0),
    )
    row = with_goals({"case": "8b: one row", "share": 0.85, "ms": 4.0}, goals)
    assert row["goals"] == [{"column": "share", "limit": "≥ 0.85", "value": 0.85, "is_met": True}] and row["is_met"]
    row = with_goals({"case": "8b: one row", "share": 0.9, "idle": 0.011}, goals)
    assert [goal["is_met"] for goal in row["goals"]] == [True, False] and not row["is_met"]
    assert with_goals({"case": "14b", "share": 1.0}, goals) == {"case": "14b", "share": 1.0}


def test_the_goals_name_cases_that_exist() -> None:
    names = [case for model in ("0.6b", "8b") for case in engines.model_cases(model)]
    names += [name for name, _ in goals.rows(goals.FULL)]
    for goal in (*engines.GOALS, *goals.GOALS):
        assert any(name.startswith(goal.case) for name in names), goal


def test_a_rehearsals_figures_are_marked(measured: Results) -> None:
    text = summary([STAGE], Results(measured.document | {"is_rehearsal": True}), "")
    assert "without meaning" in text and "**no**" not in text
