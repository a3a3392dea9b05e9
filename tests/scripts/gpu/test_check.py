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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tokenloom.scripts.gpu import check, stages
from tokenloom.scripts.gpu.check import Check, parse
from tokenloom.scripts.gpu.plan import Need, Place, Plan, Results, Row, Stage, Step, outcome
from tokenloom.scripts.gpu.run import Ended, run_streamed
from tokenloom.scripts.gpu.stages import PYTEST_INI, ROOT, Machine, Started, bare_package
from tokenloom.tests.support.today import some
from tokenloom.tests.support.waiting import wait_until

SCRIPT = ROOT / "scripts" / "gpu_check"
TIMEOUT_S = 60
PLACE = Place("c1", "a device")
FACTS = {"gpu": {"count": 1, "memory_bytes": 80 << 30, "num_sms": 132}, "versions": {"torch": "2"}, "date": "today"}


# a plugin that is not needed takes longer to import than all others to run
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Make tmp_path a bare package."""
    return bare_package(tmp_path, is_rehearsal=False) | FEW_PLUGINS


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(torch.cuda.is_available(), reason="covers the case without a GPU")
@pytest.mark.parametrize("earlier", some([None, {"form": 2, "stages": {"works": "kept"}}], 1))
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
    ("facts", "known", "rehearses", "reason"),
    [
        ({"gpu": None, "reason": "no torch"}, None, False, "nothing to check, no torch"),
        ({"gpu": {}, "missing": ["zmq", "msgspec"]}, None, False, "packages on PYTHONPATH first: zmq, msgspec"),
        ({"gpu": {}, "missing": []}, {"is_rehearsal": True}, False, "is of a rehearsal: give another file"),
        ({"gpu": {}, "missing": []}, {"is_rehearsal": False}, True, "is of a device: give another file"),
    ],
)
def test_an_obstacle_is_named(
    facts: dict[str, Any], known: dict[str, Any] | None, rehearses: bool, reason: str
) -> None:
    assert reason in check.obstacle(facts, known, parse(["out.json", *["--rehearse"] * rehearses]))


def test_a_changed_source_is_another_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    (tmp_path / "a.py").write_text("1\n")
    without_git = check.commit(tmp_path)
    assert without_git.startswith("sources+") and check.commit(tmp_path) == without_git
    git("init")
    git("add", "-A")
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "-m", "m")
    clean = check.commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "a.py").write_text("2\n")
    changed = check.commit(tmp_path)
    assert changed.startswith(f"{clean}+") and changed != check.commit(ROOT)
    (tmp_path / "a.py").write_text("3\n")
    assert check.commit(tmp_path) != changed


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_a_command_over_its_time_limit_is_stopped(handler: str, tmp_path: Path) -> None:
    program = f"import signal, sys, threading; signal.signal(signal.SIGINT, signal.{handler}); print('started')"
    program += "; sys.stdout.flush(); threading.Event().wait(30)"
    command = [sys.executable, "-I", "-S", "-c", program]
    result = run_streamed(command, tmp_path, dict(os.environ), timeout_s=2.0, grace_s=2.0)
    assert result.code is None and result.lines[0] == "started"
    assert (result.lines[-1] == "KeyboardInterrupt") == (handler != "SIG_IGN")


def test_nothing_that_a_command_started_outlives_it(tmp_path: Path) -> None:
    """Not even a process of another session that holds the output open."""
    child = "import os, threading; print(os.getpid(), flush=True); threading.Event().wait()"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    result = run_streamed([sys.executable, "-c", program], tmp_path, dict(os.environ), TIMEOUT_S, follow_s=0.3)
    assert result.code == 0
    wait_until(lambda: not is_alive(int(result.lines[0])), "it closes its output some time before it is gone")


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
    by_stage = {name: stages.test_files(name) for name in ("others", *stages.PARALLEL, *stages.ALONE)}
    found = [file for files in by_stage.values() for file in files]
    assert sorted(found) == stages.gpu_test_files()
    assert "tokenloom/tests/gpu/test_parity.py" in by_stage["parity"]
    assert "tokenloom/tests/workers/sampling/test_token_mask.py" in by_stage["others"]
    assert all(by_stage.values())
    assert {stage.name for stage in stages.STAGES} == set(by_stage) | set(stages.SCRIPTS)


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


def run_tests(
    folder: Path, environment: dict[str, str], machine: Machine, skip: list[str], **files: str
) -> dict[str, Any]:
    """Run test files as a stage does; return the report with its rows by test."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "selection.json").write_text(json.dumps({"only": None, "skip": skip}))
    started = machine.start_tests("parity", folder, [f"{name}.py" for name in files], is_alone=False)
    run_streamed(started.command, folder, environment | started.environment, TIMEOUT_S)
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


def test_a_failed_test_runs_again_alone_with_blocking_launches(tmp_path: Path, environment: dict[str, str]) -> None:
    text = "import os, pytest\npytestmark = pytest.mark.gpu\n"
    text += "def test_context(): assert os.environ.get('CUDA_LAUNCH_BLOCKING') == '1'\ndef test_bad(): assert 1 == 2\n"
    (tmp_path / "test_some.py").write_text(text)
    rows: list[Row] = [{"case": f"test_some.py::test_{name}", "error": "e"} for name in ("context", "bad")]
    check = Check(Results(PLACE), Machine(2, is_rehearsal=False), environment, None)
    check.ask_again("parity", tmp_path, rows, left_s=TIMEOUT_S)
    assert rows[0]["again"] == "passes alone"
    assert any("assert 1 == 2" in line for line in rows[1]["again"])


# ── calls, with small commands as stages ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SmallMachine(Machine):
    """Two stages; JSON files in `home` say how their cases end."""

    home: Path = Path()
    limit_s: int = 20

    def stages(self) -> list[Stage]:
        return [Stage(name, f"title of {name}", 5, 1, self.limit_s) for name in ("a", "b")]

    def is_script(self, stage: str) -> bool:
        return True

    def start(self, stage: str, folder: Path, skip: Any) -> Started:
        (folder / "skip.json").write_text(json.dumps(list(skip)))
        flags = ["--json", str(folder / "report.json"), "--skip", str(folder / "skip.json")]
        return Started([*self._command(stage), *flags], {})

    def start_alone(self, stage: str, folder: Path, case: str) -> Started:
        return Started([*self._command(stage), "--case", case], {"CUDA_LAUNCH_BLOCKING": "1"})

    def _command(self, stage: str) -> list[str]:
        module = "tokenloom.tests.scripts.gpu.fake_stage"
        return [sys.executable, "-m", module, str(self.home / stage / "behaviours.json")]


@dataclass
class Day:
    """The calls of a day, each with the file that the last one left."""

    home: Path
    environment: dict[str, str]
    hangs: float = 0.7

    @property
    def out(self) -> Path:
        return self.home / "out.json"

    def call(self, commit: str = "c1", seconds: float = 300, limit_s: int = 20, **stages: dict[str, str]) -> Results:
        for name in ("a", "b"):
            (self.home / name).mkdir(exist_ok=True)
            (self.home / name / "ran").write_text("")
            (self.home / name / "behaviours.json").write_text(json.dumps(stages.get(name, {})))
        known = json.loads(self.out.read_text()) if self.out.exists() else None
        results = Results(Place(commit, "a device"), known)
        results.document |= FACTS
        machine = SmallMachine(2, False, home=self.home, limit_s=limit_s)
        check, package = Check(results, machine, self.environment, self.out, self.hangs), self.home / "package"
        plan = Plan(machine.stages(), results, 1)
        check.run_all(plan, package, time.monotonic(), seconds)
        self.code = check.finish(plan, parse([str(self.out)]))
        return results

    def ran(self, stage: str) -> list[str]:
        return (self.home / stage / "ran").read_text().split()


@pytest.fixture
def day(tmp_path: Path) -> Day:
    (tmp_path / "package").mkdir()
    return Day(tmp_path, bare_package(tmp_path / "package", is_rehearsal=False))


def test_a_day_goes_on_after_failures_a_mend_and_another_commit(day: Day) -> None:
    first = {"a1": "passes", "a2": "fails", "a3": "passes alone", "a4": "no such device"}
    results = day.call(a=first, b={"b1": "exits", "b2": "passes"})
    assert results.count("a")[:4] == (1, 2, 1, 0) and results.count("b")[:4] == (1, 1, 0, 0)
    assert day.ran("b") == ["b1", "b1", "b2"], "once more alone; then the command goes on behind it"
    found = results.results("a")
    assert found["a3"]["again"] == "passes alone" and any("a2 is bad" in line for line in found["a2"]["again"])
    assert "exit code 7 while it ran" in results.results("b")["b1"]["error"]
    assert day.code == 1
    text = day.out.with_suffix(".md").read_text()
    assert "- a: `a2`" in text and "`a3`, **passes alone**" in text and f"scripts/gpu_check {day.out}" in text
    assert "a2 is bad" in day.out.with_suffix(".log").read_text()

    results = day.call(a=first | {"a2": "passes", "a3": "passes"}, b={"b1": "passes", "b2": "passes"})
    assert day.ran("a") == ["a2", "a3"] and day.ran("b") == ["b1"]
    assert day.code == 0 and "Nothing is left." in day.out.with_suffix(".md").read_text()
    assert {row["case"] for row in results.document["history"]} == {"a2", "a3", "b1"}

    day.call(a=first | {"a2": "passes", "a3": "passes"}, b={"b1": "passes", "b2": "passes"})
    assert day.ran("a") == day.ran("b") == []

    results = day.call("c2", a={"a1": "passes"}, b={"b1": "passes", "b2": "passes"})
    assert day.ran("a") == ["a1"] and day.ran("b") == ["b1", "b2"]
    assert results.cases("a") == ["a1"] and day.code == 0


def test_a_hanging_case_ends_with_its_stage_and_what_was_measured_stays(day: Day) -> None:
    day.hangs = 0.0
    results = day.call(limit_s=5, a={"a1": "passes", "a2": "hangs", "a3": "passes"}, b={"b1": "passes"})
    assert outcome(results.results("a")["a1"]) == "passed" and outcome(results.results("b")["b1"]) == "passed"
    assert "when the stage's 5 s ended" in results.results("a")["a2"]["error"]
    assert results.count("a").passed == 2, "a3 had its turn after all others"


@pytest.mark.parametrize(("ran_s", "is_blamed"), [(8, True), (6, False)])
def test_a_case_that_was_cut_off_is_blamed_if_it_had_most_of_the_longest_time(ran_s: float, is_blamed: bool) -> None:
    report: dict[str, Any] = {"cases": ["a1"], "running": {"a1": time.time() - ran_s}, "rows": []}
    step = Step(Stage("a", "", 5, 1, 10), Need.NEW, [], 10)
    assert not check.blame(report, Ended(None, []), step, check.HANGS)
    assert bool(report["rows"]) == is_blamed


def test_a_stage_without_time_is_left_for_the_next_call(day: Day) -> None:
    day.call(seconds=1, a={"a1": "passes"}, b={})
    assert day.ran("a") == [] and day.code == 3
    text = day.out.with_suffix(".md").read_text()
    assert "Left or failed: a, b." in text
    day.call(a={"a1": "passes"}, b={"b1": "passes"})
    assert day.ran("a") == ["a1"] and day.code == 0


def test_a_command_that_does_not_start_is_a_failure_with_its_last_words(day: Day) -> None:
    package = day.home / "package" / "tokenloom"
    package.unlink()
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('no such machine')")
    results = day.call(a={"a1": "passes"}, b={})
    assert results.count("a").failed == 1 and day.code == 1
    assert "OSError: no such machine" in next(iter(results.results("a").values()))["error"]


def test_a_device_that_answers_no_more_is_left_to_the_next_process(day: Day) -> None:
    (day.home / "a").mkdir()
    (day.home / "a" / "is_broken").write_text("")
    results = day.call(a={"a1": "fails", "a2": "passes", "a3": "fails", "a4": "passes"}, b={})
    assert results.count("a")[:4] == (2, 2, 0, 0)
    ends = [start["ended"] for start in results.document["stages"]["a"]["starts"]]
    assert ends == ["broken", "broken", "done"]


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
    kept = json.loads(day.out.read_text())["stages"]["a"]["results"]
    assert list(kept) == ["a1"] and day.ran("b") == [] and day.code == 3
