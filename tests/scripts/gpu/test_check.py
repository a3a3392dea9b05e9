"""scripts/gpu_check reports a missing GPU; with one, its calls follow commands, keep their rows, and say the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tokenloom.scripts.gpu import check, stages
from tokenloom.scripts.gpu.check import Check
from tokenloom.scripts.gpu.results import Count, Results, Row
from tokenloom.scripts.gpu.run import GRACE_S, run_command
from tokenloom.scripts.gpu.stages import PYTEST_INI, ROOT, STAGES, Machine, Stage, Started, bare_package
from tokenloom.tests.support.today import some
from tokenloom.tests.support.waiting import wait_until

SCRIPT = ROOT / "scripts" / "gpu_check"
TIMEOUT_S = 60
GPU = {"name": "a device", "count": 1, "memory_bytes": 80 << 30, "num_sms": 132}
FACTS = {"gpu": GPU, "versions": {"torch": "2"}, "date": "today", "is_rehearsal": False}


# a plugin that is not needed takes longer to import than all others to run
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Make tmp_path a bare package."""
    return bare_package(tmp_path, is_rehearsal=False) | FEW_PLUGINS


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(torch.cuda.is_available(), reason="covers the case without a GPU")
@pytest.mark.parametrize("earlier", some([None, {"stages": {"works": "kept"}}], 1))
def test_without_a_gpu_the_check_reports_that_and_succeeds(tmp_path: Path, earlier: dict[str, Any] | None) -> None:
    environment, out = {**os.environ, "PYTHON": sys.executable}, tmp_path / "out.json"
    if earlier is not None:
        out.write_text(json.dumps(earlier))
    done = subprocess.run(
        [SCRIPT, str(out)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "nothing to check" in done.stdout
    document = json.loads(out.read_text())
    if earlier is None:
        assert document["gpu"] is None and "CUDA" in document["reason"] and document["versions"]["torch"]
    else:
        assert document == earlier


@pytest.mark.parametrize(
    ("facts", "known", "is_rehearsal", "reason"),
    [
        ({"gpu": None, "reason": "no torch"}, None, False, "nothing to check, no torch"),
        ({"gpu": GPU, "missing": ["zmq", "msgspec"]}, None, False, "packages on PYTHONPATH first: zmq, msgspec"),
        ({"gpu": GPU, "missing": []}, FACTS | {"is_rehearsal": True}, False, "is of a rehearsal: give another one"),
        ({"gpu": GPU, "missing": []}, FACTS, True, "is of a device: give another one"),
        ({"gpu": GPU | {"name": "other"}, "missing": []}, FACTS, False, "is of a device: give another one"),
        ({"gpu": GPU, "missing": []}, FACTS, False, ""),
        ({"gpu": GPU, "missing": []}, FACTS | {"gpu": None}, False, ""),
    ],
)
def test_an_obstacle_is_named(
    facts: dict[str, Any], known: dict[str, Any] | None, is_rehearsal: bool, reason: str
) -> None:
    found = check.obstacle(facts, known, is_rehearsal)
    assert reason in found and bool(reason) == bool(found)


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_a_command_over_its_time_limit_is_stopped(handler: str, tmp_path: Path) -> None:
    program = f"import signal, sys, threading; signal.signal(signal.SIGINT, signal.{handler}); print('started')"
    program += "; sys.stdout.flush(); threading.Event().wait(30)"
    command = [sys.executable, "-I", "-S", "-c", program]
    (tmp_path / "log").write_text("of the command before\n")
    result = run_command(command, tmp_path, dict(os.environ), 2.0, tmp_path / "log", grace_s=2.0)
    lines = result.output.splitlines()
    assert result.code is None and lines[0] == "started"
    assert (lines[-1] == "KeyboardInterrupt") == (handler != "SIG_IGN")


def test_nothing_that_a_command_started_outlives_it(tmp_path: Path) -> None:
    """Not even a process of another session."""
    child = "import os, threading; print(os.getpid(), flush=True); threading.Event().wait()"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True, stdout=subprocess.PIPE)"
    program = f"import subprocess, sys; print(int({start}.stdout.readline()))"
    result = run_command([sys.executable, "-c", program], tmp_path, dict(os.environ), TIMEOUT_S, tmp_path / "log")
    assert result.code == 0
    wait_until(lambda: not is_alive(int(result.output)))


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_bare_package_imports_this_checkout(tmp_path: Path, environment: dict[str, str]) -> None:
    program = "import tokenloom, tokenloom.scripts.gpu.check; print(tokenloom.__file__)"
    found = subprocess.check_output([sys.executable, "-c", program], env=environment, cwd=tmp_path, text=True)
    assert Path(found.strip()) == tmp_path / "tokenloom" / "__init__.py"


def test_the_bare_package_knows_the_marks_of_this_checkout() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert all(f"    {mark.partition(':')[0]}:" in PYTEST_INI for mark in options["markers"])


def test_every_file_with_a_gpu_mark_is_in_one_stage() -> None:
    by_stage = {name: stages.test_files(name) for name in ("others", *stages.TESTS)}
    assert sorted(file for files in by_stage.values() for file in files) == stages.gpu_test_files()
    assert "tokenloom/tests/workers/sampling/test_token_mask.py" in by_stage["others"] and all(by_stage.values())
    assert {stage.name for stage in STAGES} == set(by_stage) | set(stages.SCRIPTS)


def test_the_stages_fit_into_two_calls() -> None:
    expected = {stage.name: stage.expected_s for stage in STAGES}
    first = ("works", "parity", "graphs", "processes", "engines")
    assert tuple(expected)[: len(first)] == first
    assert sum(expected[name] for name in first) <= check.FIRST_S - check.ENDING_S - GRACE_S
    assert sum(expected[name] for name in ("goals", "8b")) <= check.LATER_S - check.ENDING_S - GRACE_S
    assert all(stage.expected_s < stage.most_s for stage in STAGES)


# ── tests ────────────────────────────────────────────────────────────────────────────────────────────────────────────

SOME_TESTS = """
import os, pytest, time, tokenloom
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize('x', ['a b', 'c'])
def test_good(x): assert tokenloom.__version__
def test_bad(): assert 1 == 2
def test_away(): pytest.skip('no such device')
@pytest.fixture
def broken(): raise OSError('no file')
def test_broken(broken): pass
"""


def outcome(row: Row) -> str:
    return "failed" if "error" in row else "skipped" if "not_measured" in row else "passed"


def run_tests(
    folder: Path, environment: dict[str, str], machine: Machine, skip: list[str], **files: str
) -> dict[str, Any]:
    """Run test files as a stage does; return the report with its rows by test."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "skip.json").write_text(json.dumps(skip))
    started = machine.start_tests(folder, [f"{name}.py" for name in files], is_alone=False)
    run_command(started.command, folder, environment | started.environment, TIMEOUT_S, folder / "log")
    report = check.read_report(folder / "report.json")
    names = [row["case"] for row in report["rows"]]
    assert len(set(names)) == len(names)
    return {**report, "rows": {row["case"]: row for row in report["rows"]}}


@pytest.mark.parametrize("num_cpus", some([1, 2], 1))
def test_outcomes_are_written_with_their_reasons_and_done_tests_do_not_run(
    num_cpus: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    done = [f"test_done.py::test_{name}" for name in ("good[a b]", "bad", "broken")]
    files = {"test_some": SOME_TESTS, "test_done": SOME_TESTS, "test_unreadable": "import nothing_such"}
    report = run_tests(tmp_path, environment, Machine(num_cpus, is_rehearsal=False), done, **files)
    rows, name = report["rows"], "test_some.py::test_{}".format
    assert set(report["cases"]) == {*rows, *done} and not report["running"]
    assert {case for case in rows if case.startswith("test_done")} == {
        "test_done.py::test_good[c]",
        "test_done.py::test_away",
    }
    outcomes = {case: outcome(row) for case, row in rows.items() if not case.startswith("test_done")}
    good = {name("good[a b]"): "passed", name("good[c]"): "passed"}
    bad = dict.fromkeys((name("bad"), name("broken"), "test_unreadable.py"), "failed")
    assert outcomes == good | bad | {name("away"): "skipped"}
    assert "assert 1 == 2" in rows[name("bad")]["error"] and "no file" in rows[name("broken")]["error"]
    assert "nothing_such" in rows["test_unreadable.py"]["error"]
    assert rows[name("away")]["not_measured"] == "no such device"


@pytest.mark.parametrize("num_cpus", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_test_that_ends_or_hangs_its_process_has_failed(
    num_cpus: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    text = "import os, pytest, threading\npytestmark = pytest.mark.gpu\ndef test_exits(): os._exit(7)\n"
    text += "def test_hangs(): threading.Event().wait()\ndef test_good(): pass\n"
    report = run_tests(tmp_path, environment, Machine(num_cpus, False, test_limit_s=3), [], test_some=text)
    if num_cpus == 2:  # another process goes on
        outcomes = {case.partition("::test_")[2]: outcome(row) for case, row in report["rows"].items()}
        assert outcomes == {"exits": "failed", "hangs": "failed", "good": "passed"}
    else:
        assert list(report["running"]) == ["test_some.py::test_exits"]


# ── calls, with small commands as stages ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SmallMachine(Machine):
    """JSON files in `home` say how the cases of each stage end."""

    home: Path = Path()

    def start(self, stage: str, folder: Path, skip: Collection[str]) -> Started:
        (folder / "skip.json").write_text(json.dumps(list(skip)))
        command = [sys.executable, "-m", "tokenloom.tests.scripts.gpu.fake_stage"]
        command += [str(self.home / stage / "behaviours.json")]
        return Started([*command, "--json", str(folder / "report.json"), "--skip", str(folder / "skip.json")], {})


@dataclass
class Day:
    """The calls of a day with two stages, each with the file that the last one left."""

    home: Path
    environment: dict[str, str]

    @property
    def out(self) -> Path:
        return self.home / "out.json"

    def call(
        self, commit: str = "c1", seconds: float = 300, limit_s: int = 20, **behaviours: dict[str, str]
    ) -> Results:
        for name in ("a", "b"):
            (self.home / name).mkdir(exist_ok=True)
            (self.home / name / "ran").write_text("")
            (self.home / name / "behaviours.json").write_text(json.dumps(behaviours.get(name, {})))
        results = Results(json.loads(self.out.read_text()) if self.out.exists() else None)
        results.document |= {**FACTS, "commit": commit}
        chosen = [Stage(name, f"title of {name}", 3, limit_s) for name in ("a", "b")]
        machine = SmallMachine(2, False, home=self.home)
        call = Check(results, machine, self.home / "package", self.environment, self.out)
        call.run_all(chosen, time.monotonic(), seconds)
        self.code = call.finish(chosen, ["scripts/gpu_check", str(self.out)])
        return results

    def ran(self, stage: str) -> list[str]:
        return (self.home / stage / "ran").read_text().split()


@pytest.fixture
def day(tmp_path: Path) -> Day:
    (tmp_path / "package").mkdir()
    return Day(tmp_path, bare_package(tmp_path / "package", is_rehearsal=False))


def test_a_day_goes_on_after_failures_and_skips_what_has_passed(day: Day) -> None:
    first = {"a1": "passes", "a2": "fails", "a3": "passes alone", "a4": "no such device"}
    results = day.call(a=first, b={"b1": "exits", "b2": "passes"})
    assert results.count("a") == Count(2, 1, 1, 0) and results.count("b") == Count(1, 1, 0, 0)
    assert day.ran("a") == ["a1", "a2", "a3", "a4", "a2", "a3"], "what failed runs once more"
    assert day.ran("b") == ["b1", "b2", "b1"], "the command goes on behind the case that broke it"
    assert "a3 is bad" in results.rows("a")["a3"]["failed_before"]
    assert "exit code 7 while it ran" in results.rows("b")["b1"]["error"]
    text = day.out.with_suffix(".md").read_text()
    assert day.code == 1 and "- a: `a2`" in text and "`a3`, **passed at another try**" in text
    assert f"scripts/gpu_check {day.out}" in text and "a2 is bad" in day.out.with_suffix(".log").read_text()

    mended = first | {"a2": "passes", "a3": "passes"}
    results = day.call("c2", a=mended, b={"b1": "passes", "b2": "passes"})
    assert day.ran("a") == ["a2"] and day.ran("b") == ["b1"]
    assert [results.rows("a")[case]["commit"] for case in ("a1", "a2")] == ["c1", "c2"]
    assert day.code == 0 and "Nothing is left." in day.out.with_suffix(".md").read_text()

    results = day.call(a=mended, b={"b1": "passes", "b2": "passes"})
    assert day.ran("a") == day.ran("b") == [] and len(results.document["calls"]) == 3


def test_a_hanging_case_ends_with_its_stage_and_what_was_measured_stays(day: Day) -> None:
    hanging = {"a1": "passes", "a2": "hangs", "a3": "passes"}
    results = day.call(seconds=22, limit_s=5, a=hanging, b={"b1": "passes"})
    assert "error" not in results.rows("a")["a1"] and results.count("b").passed == 1
    assert "cut off at the stage's limit" in results.rows("a")["a2"]["error"] and "a3" not in results.rows("a")
    results = day.call(seconds=22, a=hanging, b={"b1": "passes"})
    assert results.count("a") == Count(2, 1, 0, 0), "cases without an outcome are the first"


def test_a_stage_without_time_is_left_for_the_next_call(day: Day) -> None:
    day.call(seconds=1, a={"a1": "passes"}, b={})
    assert day.ran("a") == [] and day.code == 3
    assert "Left or failed: a, b." in day.out.with_suffix(".md").read_text()
    day.call(a={"a1": "passes"}, b={"b1": "passes"})
    assert day.ran("a") == ["a1"] and day.code == 0


def test_a_command_that_does_not_start_is_a_failure_with_its_last_words(day: Day) -> None:
    package = day.home / "package" / "tokenloom"
    package.unlink()
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('no such machine')")
    results = day.call(a={"a1": "passes"}, b={})
    assert results.count("a").failed == 1 and day.code == 1
    assert "OSError: no such machine" in next(iter(results.rows("a").values()))["error"]


def test_a_device_that_answers_no_more_is_left_to_the_next_process(day: Day) -> None:
    (day.home / "a").mkdir()
    (day.home / "a" / "is_broken").write_text("")
    results = day.call(a={"a1": "fails", "a2": "passes", "a3": "fails", "a4": "passes"}, b={})
    assert results.count("a") == Count(2, 2, 0, 0)
    assert [start["code"] for start in results.starts("a")] == [3, 3, 0, 3, 3]


def test_an_interrupt_keeps_what_was_measured(day: Day) -> None:
    def stop() -> None:
        wait_until(lambda: (day.home / "a" / "ran").exists() and "a2" in day.ran("a"))
        os.kill(os.getpid(), signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, check.interrupt)
    stopper = threading.Thread(target=stop)
    try:
        stopper.start()
        day.call(limit_s=50, a={"a1": "passes", "a2": "hangs"}, b={"b1": "passes"})
    finally:
        stopper.join()
        signal.signal(signal.SIGTERM, previous)
    kept = json.loads(day.out.read_text())["stages"]["a"]
    assert list(kept["rows"]) == ["a1"] and day.ran("b") == [] and day.code == 3
