"""A mutant that a law survives is a fault, and a law leaves the default run only if something else holds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenloom.scripts.checks.laws import default_tests, find_holder
from tokenloom.scripts.checks.try_mutants import FOLDER, Mutant, Mutants, Renamed, read_mutants, try_mutant

TESTS = """
import pytest
from tokenloom.tests.support.today import some

def helper(): pass

@pytest.mark.parametrize("seed", some(range(9), 2))
def test_of_each_day(seed): pass

@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(9))
def test_of_the_night(seed): pass

class TestInAClass:
    async def test_method(self): pass
"""


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (TESTS, ["test_of_each_day", "test_method"]),
        (f"{TESTS}\npytestmark = [pytest.mark.nightly, pytest.mark.timeout(9)]", []),
        (f"{TESTS}\npytestmark = pytest.mark.timeout(9)", ["test_of_each_day", "test_method"]),
    ],
)
def test_a_law_is_of_the_default_run_unless_it_or_its_file_runs_at_night(source: str, names: list[str]) -> None:
    assert list(default_tests(source)) == names


def test_a_law_that_left_is_held_by_a_new_name_or_by_a_mutant_that_a_default_law_catches() -> None:
    left = "tests/old.py::test_old"
    mutants = Mutants(
        [
            Mutant("core/a.py", "x", "y", red=["tests/gone.py::test_gone"], left=[left]),
            Mutant("core/b.py", "x", "y", red=["tests/kept.py::test_kept"], left=["tests/old.py::test_other"]),
        ],
        [Renamed(left, "tests/gone.py::test_renamed")],
    )
    laws = {"tests/kept.py::test_kept"}
    assert find_holder(left, laws, mutants) is None
    assert "test_kept" in (find_holder("tests/old.py::test_other", laws, mutants) or "")
    assert "test_old" in (find_holder(left, laws | {"tests/elsewhere.py::test_old"}, mutants) or "")
    assert "test_renamed" in (find_holder(left, laws | {"tests/gone.py::test_renamed"}, mutants) or "")


def test_a_law_that_a_mutant_does_not_turn_red_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    text = "def add(a, b):\n    return a + b\n"
    (tmp_path / "sums.py").write_text(text)
    (tmp_path / "test_sums.py").write_text(
        "from sums import add\ndef test_seeing(): assert add(1, 2) == 3\ndef test_blind(): assert add(0, 0) == 0\n"
    )
    mutant = Mutant("sums.py", "a + b", "a - b", ["test_sums.py::test_seeing", "test_sums.py::test_blind"])
    assert list(try_mutant(tmp_path, mutant, with_left=False)) == ["test_sums.py::test_blind survives it"]
    assert (tmp_path / "sums.py").read_text() == text
    for old, count in (("a * b", 0), ("a", 3)):
        mutant = Mutant("sums.py", old, "", ["test_sums.py::test_seeing"])
        assert list(try_mutant(tmp_path, mutant, with_left=False)) == [f"its old text stands there {count} times"]


def test_each_text_of_a_file_has_a_second_of_its_own_so_that_no_compiled_file_of_another_is_taken(
    tmp_path: Path,
) -> None:
    file = tmp_path / "sums.py"
    file.write_text("def add(a, b):\n    return a + b\n")
    os.utime(file, (1, 1))  # the files of a tree are older than the run
    mutant = Mutant("sums.py", "a + b", "a - b", ["test_none.py::test_none"])
    before = file.stat().st_mtime
    changed = [file.stat().st_mtime for _ in try_mutant(tmp_path, mutant, with_left=False)]
    assert len({int(each) for each in (before, *changed, file.stat().st_mtime)}) == 3


def test_every_mutant_fits_the_code_and_names_laws_of_the_default_run() -> None:
    """By their texts; `try_mutants.py` runs them."""
    root, faults = FOLDER.parents[2], []
    for mutant in read_mutants().mutant:
        if (root / mutant.file).read_text(encoding="utf-8").count(mutant.old) != 1:
            faults.append(f"{mutant.file} has {mutant.old!r} not once")
        for law in mutant.red:
            file, _, name = law.partition("::")
            if name not in default_tests((root / file).read_text(encoding="utf-8")):
                faults.append(f"{law} is not of the default run")
    assert faults == []
