"""Failed tests run once more, alone; a test that passes then is written down, and may not be flaky again soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.scripts.checks.run_tests import MAX_ALONE, NUM_RUNS, Suite

FLAKY = """
from pathlib import Path

def test_first_time():
    seen = Path(__file__).with_name("seen")
    assert seen.exists() or seen.touch(), "the first time fails"
"""

BUSY = """
import time

def test_busy():
    end = time.process_time() + 0.3
    while time.process_time() < end: pass
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each takes longer to import than the tests to run
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    (tmp_path / ".ci").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:cacheprovider --import-mode=importlib\n")
    return Suite(tmp_path)


@pytest.mark.parametrize(("num_between", "is_green"), [(1, False), (NUM_RUNS - 1, False), (NUM_RUNS, True)])
def test_a_test_flaky_twice_within_the_last_runs_makes_the_run_red(
    suite: Suite, num_between: int, is_green: bool
) -> None:
    assert suite.note_flaky(7, "test_first.py::test_first_time", "AssertionError: a\tb")
    assert suite.note_flaky(7, "test_first.py::test_second_time", "AssertionError: c")
    assert suite.note_flaky(7 + num_between, "test_first.py::test_first_time", "AssertionError: d") is is_green
    assert len(suite.flaky.read_text().splitlines()) == 3


def test_a_test_that_passes_alone_is_flaky_and_one_that_fails_twice_makes_the_run_red(
    suite: Suite, capsys: pytest.CaptureFixture[str]
) -> None:
    (suite.folder / "test_first.py").write_text(FLAKY)
    (suite.folder / "test_busy.py").write_text(BUSY)
    assert suite.run(["-n", "2"]) == 0
    assert "flaky: test_first.py::test_first_time (AssertionError: the first time fails" in capsys.readouterr().out
    assert suite.flaky.read_text().split("\t")[::2] == ["1", "test_first.py::test_first_time"]
    head, busy, first = suite.durations.read_text().splitlines()
    assert head.endswith("run 1") and suite.last_run() == 1
    assert busy.endswith("\t1\ttest_busy.py") and float(busy.split("\t")[0]) >= 0.3
    assert first.endswith("\t1\ttest_first.py")

    (suite.folder / "test_wrong.py").write_text("def test_wrong(): assert False, 'always'\n")
    assert suite.run([]) == 1
    assert "failed twice: test_wrong.py::test_wrong (AssertionError: always" in capsys.readouterr().out


def test_a_file_that_cannot_be_collected_makes_the_run_red(suite: Suite) -> None:
    (suite.folder / "test_broken.py").write_text("import no_such_module\n")
    (suite.folder / "test_quick.py").write_text("def test_one(): pass\n")
    assert suite.run([]) != 0


def test_a_broken_tree_is_not_tried_again(suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    (suite.folder / "test_all.py").write_text(
        f"import pytest\n@pytest.mark.parametrize('n', range({MAX_ALONE + 1}))\ndef test_all(n): assert False\n"
    )
    assert suite.run([]) == 1
    assert f"{MAX_ALONE + 1} tests failed" in capsys.readouterr().out
