"""A pytest plugin that writes down a run for scripts/checks/run_tests.py: failed tests, and the seconds of each file.

Files run in the order of their seconds in the last run that was committed, so that no long one begins last.

CPU seconds are those of the test process and of its children that have ended: an engine counts for the test that stops
it.
"""

from __future__ import annotations

import resource
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

OPTION = "--record"
DURATIONS = ".ci/durations.tsv"


@dataclass
class FileTime:
    """Seconds of the tests of one file."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    num_tests: int = 0


@dataclass
class RunRecord:
    """One run: the error of each failed test by its name, and the time of each file by its path."""

    errors: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileTime] = field(default_factory=dict)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, help="write failed tests and the seconds of each file there, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    file: Path | None = config.getoption(OPTION)
    config.pluginmanager.register(CpuMeter(), "cpu meter")
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist: it reports to the process that writes
    if file is not None and not is_worker:
        config.pluginmanager.register(Recorder(file), "recorder")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort files that run longest first; those without a record come before all others."""
    table = config.rootpath / DURATIONS
    if table.exists():
        lines = [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines()[1:]]
        seconds = {path: float(wall_s) for _, wall_s, _, path in lines}
        items.sort(key=lambda item: -seconds.get(item.nodeid.split("::", 1)[0], float("inf")))


class CpuMeter:
    """Adds `cpu_s` to each report, where the test runs."""

    def __init__(self) -> None:
        self._read_s = _cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._read_s = self._read_s, _cpu_s()
        report.cpu_s = self._read_s - before  # type: ignore[attr-defined]
        return report


class Recorder:
    """Keeps the reports and writes them at the end of the run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._run = RunRecord()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        time = self._run.files.setdefault(report.nodeid.split("::", 1)[0], FileTime())
        time.wall_s += report.duration
        time.cpu_s += getattr(report, "cpu_s", 0.0)
        time.num_tests += report.when == "call"
        if report.failed:
            self._run.errors.setdefault(report.nodeid, _error_line(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._run.errors.setdefault(report.nodeid, _error_line(report))

    def pytest_sessionfinish(self) -> None:
        self._file.write_bytes(msgspec.json.encode(self._run))


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    uses = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _error_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the line that names the error, as at the end of a traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext.rstrip().rpartition("\n")[2]
    return text.split("\n", 1)[0][:200] if text else "no error text"
