"""scripts/gpu_check reports a missing GPU; with one, its calls follow commands, keep their rows, and say the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tokenloom.scripts import gpu_check, gpu_stages
from tokenloom.scripts.gpu_check import Check, parse
from tokenloom.scripts.gpu_plan import Place, Plan, Results, Row, Stage, outcome
from tokenloom.scripts.gpu_run import run_streamed
from tokenloom.scripts.gpu_stages import ROOT, Machine, Started, bare_package

SCRIPT = ROOT / "scripts" / "gpu_check"
TIMEOUT_S = 60
PLACE = Place("c1", "a device")
FACTS = {"gpu": {"count": 1, "memory_bytes": 80 << 30, "num_sms": 132}, "versions": {"torch": "2"}, "date": "today"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bare package."""
    return tmp_path


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    return bare_package(folder, is_rehearsal=False)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(torch.cuda.is_available(), reason="covers the case without a GPU")
def test_without_a_gpu_the_check_reports_that_and_succeeds(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    out = tmp_path / "out.json"
    for earlier in (None, {"form": 2, "stages": {"works": "kept"}}):
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
    assert reason in gpu_check.obstacle(facts, known, parse(["out.json", *["--rehearse"] * rehearses]))


def test_a_changed_source_is_another_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    (tmp_path / "a.py").write_text("1\n")
    without_git = gpu_check.commit(tmp_path)
    assert without_git.startswith("sources+") and gpu_check.commit(tmp_path) == without_git
    git("init")
    git("add", "-A")
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "-m", "m")
    clean = gpu_check.commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "a.py").write_text("2\n")
    changed = gpu_check.commit(tmp_path)
    assert changed.startswith(f"{clean}+") and changed != gpu_check.commit(ROOT)
    (tmp_path / "a.py").write_text("3\n")
    assert gpu_check.commit(tmp_path) != changed


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_a_command_over_its_time_limit_is_stopped(handler: str, tmp_path: Path) -> None:
    program = f"import signal, sys, threading; signal.signal(signal.SIGINT, signal.{handler}); print('started')"
    program += "; sys.stdout.flush(); threading.Event().wait(30)"
    command = [sys.executable, "-c", program]
    result = run_streamed(command, tmp_path, dict(os.environ), timeout_s=2.0, grace_s=2.0)
    assert result.code is None and result.lines[0] == "started"
    assert (result.lines[-1] == "KeyboardInterrupt") == (handler != "SIG_IGN")


def test_nothing_that_a_command_started_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a process of another session that holds the output open."""
    monkeypatch.setattr("tokenloom.scripts.gpu_run.FOLLOW_S", 0.3)
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    begun = time.monotonic()
    result = run_streamed([sys.executable, "-c", program], tmp_path, dict(os.environ), timeout_s=40)
    assert result.code == 0 and time.monotonic() - begun < 30
    deadline = time.monotonic() + 30  # a killed process closes its output some time before it is gone
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(int(result.lines[0])).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_bare_package_imports_this_checkout(folder: Path, environment: dict[str, str]) -> None:
    program = "import tokenloom, tokenloom.scripts.gpu_check; print(tokenloom.__file__)"
    found = subprocess.check_output([sys.executable, "-c", program], env=environment, cwd=folder, text=True)
    assert Path(found.strip()) == folder / "tokenloom" / "__init__.py"


def test_every_file_with_a_gpu_mark_is_in_one_stage() -> None:
    by_stage = {name: gpu_stages.test_files(name) for name in ("others", *gpu_stages.PARALLEL, *gpu_stages.ALONE)}
    found = [file for files in by_stage.values() for file in files]
    assert sorted(found) == gpu_stages.gpu_test_files()
    assert "tokenloom/tests/workers/models/test_decoder.py" in by_stage["parity"]
    assert "tokenloom/tests/workers/sampling/test_token_mask.py" in by_stage["others"]
    assert all(by_stage.values())
    assert {stage.name for stage in gpu_stages.STAGES} == set(by_stage) | set(gpu_stages.SCRIPTS)


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
    folder: Path, environment: dict[str, str], num_cpus: int, skip: list[str], **files: str
) -> dict[str, Any]:
    """Run test files as a stage does; return the report with its rows by test."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "selection.json").write_text(json.dumps({"only": None, "skip": skip}))
    machine = Machine(num_cpus, is_rehearsal=False)
    started = machine.start_tests("parity", folder, [f"{name}.py" for name in files], is_alone=False)
    run_streamed(started.command, folder, environment | started.environment, TIMEOUT_S)
    report = gpu_check.read_report(folder / "report.json")
    names = [row["case"] for row in report["rows"]]
    assert len(set(names)) == len(names)
    return {**report, "rows": {row["case"]: row for row in report["rows"]}}


@pytest.mark.parametrize("num_cpus", [1, 2])
def test_outcomes_are_written_with_their_reasons(num_cpus: int, folder: Path, environment: dict[str, str]) -> None:
    report = run_tests(folder, environment, num_cpus, [], test_some=SOME_TESTS, test_unreadable="import nothing_such")
    rows, name = report["rows"], "test_some.py::test_{}".format
    assert set(report["cases"]) == set(rows) and not report["running"]
    outcomes = {case: outcome(row) for case, row in rows.items()}
    good = {name("good[a b]"): "passed", name("good[c]"): "passed"}
    bad = dict.fromkeys((name("bad"), name("broken"), "test_unreadable.py"), "failed")
    assert outcomes == good | bad | {name("away"): "skipped"}
    assert "assert 1 == 2" in rows[name("bad")]["error"] and "no file" in rows[name("broken")]["error"]
    assert "nothing_such" in rows["test_unreadable.py"]["error"]
    assert rows[name("away")]["not_measured"] == "no such device"


@pytest.mark.parametrize("num_cpus", [1, 2])
def test_tests_that_are_done_do_not_run_and_are_still_listed(
    num_cpus: int, folder: Path, environment: dict[str, str]
) -> None:
    skip = [f"test_some.py::test_{name}" for name in ("good[a b]", "bad", "broken")]
    report = run_tests(folder, environment, num_cpus, skip, test_some=SOME_TESTS)
    assert set(report["rows"]) == {"test_some.py::test_good[c]", "test_some.py::test_away"}
    assert len(report["cases"]) == 5


@pytest.mark.parametrize("num_cpus", [1, 2])
def test_a_test_that_ends_or_hangs_its_process_has_failed(
    num_cpus: int, folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_stages, "TEST_LIMIT_S", 3)
    text = "import os, pytest, time\npytestmark = pytest.mark.gpu\ndef test_exits(): os._exit(7)\n"
    text += "def test_hangs(): time.sleep(50)\ndef test_good(): pass\n"
    report = run_tests(folder, environment, num_cpus, [], test_some=text)
    if num_cpus == 2:  # another process goes on
        outcomes = {case.partition("::test_")[2]: outcome(row) for case, row in report["rows"].items()}
        assert outcomes == {"exits": "failed", "hangs": "failed", "good": "passed"}
    else:
        assert list(report["running"]) == ["test_some.py::test_exits"]


def test_a_failed_test_runs_again_alone_with_blocking_launches(folder: Path, environment: dict[str, str]) -> None:
    text = "import os, pytest\npytestmark = pytest.mark.gpu\n"
    text += "def test_context(): assert os.environ.get('CUDA_LAUNCH_BLOCKING') == '1'\ndef test_bad(): assert 1 == 2\n"
    (folder / "test_some.py").write_text(text)
    rows: list[Row] = [{"case": f"test_some.py::test_{name}", "error": "e"} for name in ("context", "bad")]
    check = Check(Results(PLACE), Machine(2, is_rehearsal=False), environment, None)
    check.ask_again("parity", folder, rows, left_s=TIMEOUT_S)
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
        module = "tokenloom.tests.scripts.fake_stage"
        return [sys.executable, "-m", module, str(self.home / stage / "behaviours.json")]


@dataclass
class Day:
    """The calls of a day, each with the file that the last one left."""

    home: Path
    environment: dict[str, str]

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
        machine = SmallMachine(2, False, self.home, limit_s)
        check, package = Check(results, machine, self.environment, self.out), self.home / "package"
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
    results = day.call(limit_s=4, a={"a1": "passes", "a2": "hangs", "a3": "passes"}, b={"b1": "passes"})
    assert outcome(results.results("a")["a1"]) == "passed" and outcome(results.results("b")["b1"]) == "passed"
    assert "when the stage's 4 s ended" in results.results("a")["a2"]["error"]
    assert results.count("a").passed == 2, "a3 had its turn after all others"


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


def test_an_interrupt_keeps_what_was_measured(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom.scripts.gpu_run.FOLLOW_S", 0.2)
    previous = signal.signal(signal.SIGTERM, gpu_check.interrupt)
    try:
        stop = threading.Timer(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        stop.start()
        results = day.call(limit_s=50, a={"a1": "passes", "a2": "hangs"}, b={"b1": "passes"})
    finally:
        stop.cancel()
        signal.signal(signal.SIGTERM, previous)
    kept = json.loads(day.out.read_text())["stages"]["a"]["results"]
    assert list(kept) == ["a1"] and day.ran("b") == [] and day.code == 3
    assert results.document["calls"][-1]["seconds"] < 40
