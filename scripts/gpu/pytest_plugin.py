"""A pytest plugin for scripts/gpu_check: runs the tests that are still wanted and writes each outcome at once.

GPU_CHECK_REPORT names the file of cases.py, with tests by their ids; GPU_CHECK_SKIP a JSON list of ids. A test that
takes longer than GPU_CHECK_TEST_LIMIT_S ends its process, with the stacks of all threads: under pytest-xdist another
process goes on with the next test.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenloom.scripts.gpu.cases import Cases, shortened, write_json

STDERR = os.dup(2)  # pytest's capture replaces descriptor 2 later


class Chooser:
    """In each process that collects: keeps the wanted tests, and ends the process if one of them hangs."""

    def __init__(self, listed: Path | None) -> None:
        """`listed`: the file for the ids of all tests, which one process writes."""
        self._listed = listed
        self._skipped = set(json.loads(Path(os.environ["GPU_CHECK_SKIP"]).read_text(encoding="utf-8")))
        self._limit_s = float(os.environ["GPU_CHECK_TEST_LIMIT_S"])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._listed is not None:
            write_json(self._listed, [item.nodeid for item in items])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._skipped])
        items[:] = [item for item in items if item.nodeid not in self._skipped]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=STDERR)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


class Follower:
    """In the process that reports: writes the outcomes."""

    def __init__(self, report: Path, listed: Path) -> None:
        self._report, self._listed = report, listed
        self._cases: Cases | None = None
        self._rows: dict[str, dict[str, Any]] = {}  # of tests that run
        self._broken: dict[str, str] = {}  # error by file that cannot be collected

    @property
    def cases(self) -> Cases:
        """The outcomes; from the end of the collection on."""
        if self._cases is None:
            names = json.loads(self._listed.read_text(encoding="utf-8")) if self._listed.exists() else []
            self._cases = Cases(self._report, [*self._broken, *names])
            for name, error in self._broken.items():
                self._cases.add({"case": name, "error": error})
        return self._cases

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken[report.nodeid] = shortened(report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.cases.start(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._rows.setdefault(report.nodeid, {"case": report.nodeid})
        if report.failed:
            row["error"] = shortened(row.get("error", "") + report.longreprtext)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            row["not_measured"] = getattr(report, "wasxfail", "") or reason.removeprefix("Skipped: ")
        if report.when not in ("setup", "call"):  # teardown, or "???" of a process that ended
            self.cases.add(self._rows.pop(report.nodeid))

    def pytest_sessionfinish(self) -> None:
        _ = self.cases  # also without any test


def pytest_configure(config: pytest.Config) -> None:
    report = Path(os.environ["GPU_CHECK_REPORT"])
    listed = report.with_suffix(".cases")
    worker_input = getattr(config, "workerinput", None)  # of a process of pytest-xdist
    is_first = worker_input is None or worker_input["workerid"] == "gw0"
    config.pluginmanager.register(Chooser(listed if is_first else None))
    if worker_input is None:
        config.pluginmanager.register(Follower(report, listed))
