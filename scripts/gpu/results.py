"""Results of scripts/gpu_check: the document of all calls on one device. Standard library only; runs nothing.

    {"gpu": …, "calls": […], "stages": {name: {"cases": [all], "rows": {case: its last row}, "starts": […]}}}

A row with `error` has failed, one with `not_measured` was not possible on this machine, all others have passed. A case
that failed in an earlier start has that error as `failed_before`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Row: TypeAlias = dict[str, Any]


class Count(NamedTuple):
    """Cases of a stage by their outcomes."""

    passed: int
    failed: int
    not_measured: int
    left: int | None  # None: the stage never ran, so its cases are unknown


class Results:
    """The results of all calls, with an earlier `document`."""

    def __init__(self, document: dict[str, Any] | None = None) -> None:
        self.document: dict[str, Any] = {"calls": [], "stages": {}} | (document or {})

    def _stage(self, stage: str) -> dict[str, Any]:
        stages: dict[str, dict[str, Any]] = self.document["stages"]
        return stages.setdefault(stage, {"cases": None, "rows": {}, "starts": []})

    def rows(self, stage: str) -> dict[str, Row]:
        """Return the last row of each case that has any."""
        rows: dict[str, Row] = self._stage(stage)["rows"]
        return rows

    def cases(self, stage: str) -> list[str] | None:
        """Return all cases of a stage; None before its first start."""
        cases: list[str] | None = self._stage(stage)["cases"]
        return cases

    def starts(self, stage: str) -> list[dict[str, Any]]:
        starts: list[dict[str, Any]] = self._stage(stage)["starts"]
        return starts

    def failed(self, stage: str) -> list[str]:
        return [case for case, row in self.rows(stage).items() if "error" in row]

    def count(self, stage: str) -> Count:
        rows, cases = self.rows(stage).values(), self.cases(stage)
        num_failed, num_skipped = sum("error" in row for row in rows), sum("not_measured" in row for row in rows)
        left = None if cases is None else len(cases) - len(rows)
        return Count(len(rows) - num_failed - num_skipped, num_failed, num_skipped, left)

    def record(self, stage: str, cases: Sequence[str] | None, rows: Sequence[Row], commit: str) -> None:
        """Keep the rows that the current start has so far; the same rows may come again. `cases`: all of the stage, so
        that the rows of others are dropped; None: not known yet."""
        kept = self._stage(stage)
        for row in rows:
            before = kept["rows"].get(row["case"], {})
            error = before.get("error", before.get("failed_before"))
            remark = {} if error is None or "error" in row else {"failed_before": error}
            kept["rows"][row["case"]] = {**row, "commit": commit, **remark}
        if cases is not None:
            kept["cases"] = list(dict.fromkeys([*cases, *(row["case"] for row in rows)]))
            kept["rows"] = {case: row for case, row in kept["rows"].items() if case in kept["cases"]}

    def end(self, stage: str, facts: Mapping[str, object]) -> None:
        """Note how a start ended."""
        self.starts(stage).append(dict(facts))
