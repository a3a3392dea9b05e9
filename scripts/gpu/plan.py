"""Plan of scripts/gpu_check: which results count, which cases of which stage run next, and for how long. Runs nothing.

A stage is a list of cases that one command runs: tests, or the rows of a script. Results are kept by case, with the
commit and the device that they are of:

    passed or not measured here, at this commit        done
    never run, cut off, or failed at another commit    NEW      first: the order of the stages
    failed at this commit                              FAILED   after all that is NEW
    passed at another commit only                      OLDER    last, since those that failed there are more urgent

Results of another device, or of a rehearsal, go to the history, as do those that newer ones replace. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

Row: TypeAlias = dict[str, Any]

FORM = 2  # of the document
MAX_HISTORY = 5000


@dataclass(frozen=True)
class Stage:
    """A part of the plan. Times in seconds on a device, estimates until one has run it."""

    name: str
    title: str
    expected_s: int
    least_s: int  # with less left it is not started
    most_s: int  # a start is stopped after them
    num_devices: int = 1  # that it needs


class Place(NamedTuple):
    """Where results are valid."""

    commit: str
    device: str
    is_rehearsal: bool = False


class Need(IntEnum):
    """Why a case has to run, in the order in which the cases do."""

    NEW = 0
    FAILED = 1
    OLDER = 2
    NONE = 3


NEEDS = (Need.NEW, Need.FAILED, Need.OLDER)


class Count(NamedTuple):
    """Cases of a stage by their outcomes; `left` are those that have none that counts."""

    passed: int
    failed: int
    skipped: int
    left: int | None  # None: the stage never ran, so its cases are unknown


def outcome(row: Row) -> str:
    """Return "failed", "skipped" or "passed"."""
    return "failed" if "error" in row else "skipped" if "not_measured" in row else "passed"


def case_of(row: Row) -> str:
    return str(row["case"])


class Results:
    """The results of all calls, which make up the document that `scripts/gpu_check` writes."""

    def __init__(self, place: Place, document: dict[str, Any] | None = None) -> None:
        """Go on with an earlier `document`; results of another device or kind go to its history."""
        self.place = place
        known = document if document is not None and document.get("form") == FORM else {}
        self.document: dict[str, Any] = {"form": FORM, "calls": [], "stages": {}, "history": []} | known
        self.document |= {"commit": place.commit, "is_rehearsal": place.is_rehearsal}
        for stage, kept in self._stages.items():
            for case, row in list(kept["results"].items()):
                if (row["device"], row["is_rehearsal"]) != (place.device, place.is_rehearsal):
                    self._archive(stage, kept["results"].pop(case))

    @property
    def _stages(self) -> dict[str, dict[str, Any]]:
        stages: dict[str, dict[str, Any]] = self.document["stages"]
        return stages

    def _stage(self, stage: str) -> dict[str, Any]:
        return self._stages.setdefault(stage, {"cases": None, "results": {}, "starts": []})

    def _archive(self, stage: str, row: Row) -> None:
        history: list[Row] = self.document["history"]
        history.append({"stage": stage, **{name: value for name, value in row.items() if name != "again"}})
        del history[:-MAX_HISTORY]

    def results(self, stage: str) -> dict[str, Row]:
        """Return the stage's last row of each case, of this commit or of an older one."""
        results: dict[str, Row] = self._stages.get(stage, {}).get("results", {})
        return results

    def cases(self, stage: str) -> list[str] | None:
        """Return all cases of a stage, as far as they are known; None before its first start."""
        cases: list[str] | None = self._stages.get(stage, {}).get("cases")
        return cases

    def need(self, stage: str, case: str) -> Need:
        row = self.results(stage).get(case)
        if row is None:
            return Need.NEW
        is_here, has_failed = row["commit"] == self.place.commit, outcome(row) == "failed"
        if is_here:
            return Need.FAILED if has_failed else Need.NONE
        return Need.NEW if has_failed else Need.OLDER

    def skipped(self, stage: str, need: Need) -> list[str]:
        """Return the known cases that do not run for this need."""
        return [case for case in self.cases(stage) or [] if self.need(stage, case) is not need]

    def count(self, stage: str) -> Count:
        cases = self.cases(stage)
        found = {"passed": 0, "failed": 0, "skipped": 0, "left": 0}
        for case in cases or []:
            row = self.results(stage).get(case)
            counts = row is not None and row["commit"] == self.place.commit
            found[outcome(row) if row is not None and counts else "left"] += 1
        return Count(found["passed"], found["failed"], found["skipped"], None if cases is None else found["left"])

    def is_done(self, stage: str) -> bool:
        """Return whether every case has passed here or cannot be measured here."""
        cases = self.cases(stage)
        return cases is not None and all(self.need(stage, case) is Need.NONE for case in cases)

    def is_broken(self, stage: str) -> bool:
        """Return whether the last start broke off at a case, so that another can go on with the next."""
        starts = self._stages.get(stage, {}).get("starts", [])
        return bool(starts) and starts[-1].get("ended") == "broken"

    def forget(self, stage: str) -> None:
        """Move the stage's results to the history, so that it runs anew."""
        for row in self._stages.pop(stage, {"results": {}})["results"].values():
            self._archive(stage, row)

    def begin(self, stage: str, date: str) -> None:
        """Begin a start of the stage."""
        self._stage(stage)["starts"].append({"date": date, "commit": self.place.commit})

    def record(self, stage: str, cases: Sequence[str] | None, rows: Sequence[Row]) -> None:
        """Keep the rows that the current start has so far; the same rows may come again, and with more facts. `cases`:
        all of the stage, so that those of older commits that do not exist any more are dropped; None: not known yet."""
        kept = self._stage(stage)
        start = len(kept["starts"])
        if cases is not None:
            kept["cases"] = list(dict.fromkeys([*cases, *map(case_of, rows)]))
            for case in set(kept["results"]) - set(kept["cases"]):
                self._archive(stage, kept["results"].pop(case))
        for row in rows:
            case, old = case_of(row), kept["results"].get(case_of(row))
            if old is not None and old["start"] != start:
                self._archive(stage, old)
            kept["results"][case] = {**row, **self.place._asdict(), "start": start}

    def end(self, stage: str, facts: Mapping[str, object]) -> None:
        """Note how the current start ended."""
        self._stage(stage)["starts"][-1] |= facts


class Step(NamedTuple):
    """The next command: a stage, without the cases to skip, for at most `limit_s`."""

    stage: Stage
    need: Need
    skip: list[str]
    limit_s: float


class Plan:
    """Chooses the steps of one call. A case runs once a call, and a stage that breaks off goes on as long as it comes
    to new cases."""

    def __init__(self, stages: Sequence[Stage], results: Results, num_devices: int) -> None:
        self.stages, self._results = stages, results
        self._before = {stage.name: dict(results.results(stage.name)) for stage in stages}
        self._num_devices = num_devices
        self.without_time: list[str] = []  # stages that did not fit

    def steps(self, left_s: Callable[[], float]) -> Iterator[Step]:
        """Yield each step, after the one before has been recorded; `left_s` returns the seconds left for steps."""
        for stage in self.stages:
            if stage.num_devices > self._num_devices:
                self._leave_out(stage)
        for need in NEEDS:
            num_before = -1
            while num_before < (num_tried := sum(map(self._num_tried, self.stages))):  # some may have been cut off
                num_before = num_tried
                for stage in self.stages:
                    yield from self._steps_of(stage, need, left_s)

    def _steps_of(self, stage: Stage, need: Need, left_s: Callable[[], float]) -> Iterator[Step]:
        while (skip := self._skipped(stage, need)) is not None:
            limit_s = min(stage.most_s, left_s())
            if limit_s < stage.least_s:
                if stage.name not in self.without_time:
                    self.without_time.append(stage.name)
                return
            num_before = self._num_tried(stage)
            yield Step(stage, need, skip, limit_s)
            if self._num_tried(stage) == num_before or not self._results.is_broken(stage.name):
                return  # nothing came of it, or its time is over: a later turn goes on

    def _tried(self, stage: Stage, case: str) -> bool:
        """Return whether the case has run in this call."""
        return self._results.results(stage.name).get(case) is not self._before[stage.name].get(case)

    def _num_tried(self, stage: Stage) -> int:
        return sum(self._tried(stage, case) for case in self._results.results(stage.name))

    def _skipped(self, stage: Stage, need: Need) -> list[str] | None:
        """Return the cases that a step for `need` leaves out; None if it would have no other."""
        cases = self._results.cases(stage.name)
        if cases is None:
            return [] if need is Need.NEW else None
        kept = {case for case in cases if self._results.need(stage.name, case) is need and not self._tried(stage, case)}
        return [case for case in cases if case not in kept] if kept else None

    def _leave_out(self, stage: Stage) -> None:
        if self._results.cases(stage.name) is None:
            reason = f"takes {stage.num_devices} devices, {self._num_devices} is visible"
            self._results.record(stage.name, [stage.title], [{"case": stage.title, "not_measured": reason}])

    def choice(self) -> str:
        """Say in one line which results count, and which cases run."""
        needs = dict.fromkeys(Need, 0)
        for stage in self.stages:
            for case in self._results.cases(stage.name) or []:
                needs[self._results.need(stage.name, case)] += 1
        unknown = [stage.name for stage in self.stages if self._results.cases(stage.name) is None]
        commit, parts = self._results.place.commit, []
        if unknown:
            parts.append(f"stages that never ran: {', '.join(unknown)}")
        if needs[Need.NEW]:
            parts.append(f"{needs[Need.NEW]} cases that never ran, were cut off or failed at another commit")
        if needs[Need.FAILED]:
            parts.append(f"{needs[Need.FAILED]} that failed at this commit")
        if needs[Need.OLDER]:
            parts.append(f"{needs[Need.OLDER]} that passed at another commit only")
        return f"commit {commit}: {needs[Need.NONE]} results count. To run: {'; then '.join(parts) or 'nothing'}"
