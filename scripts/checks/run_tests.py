"""Run the tests, and each failed one once more, alone, after the whole run.

    scripts/test                  calls this for a run of the whole suite
    python scripts/checks/run_tests.py -m 'not gpu' --numprocesses 2

A test that fails in the run and passes alone depends on its neighbours or on the load. It is printed as `flaky: NAME
(error)` and added to .ci/flaky.txt with the number of the run, and does not make the run red, unless it is there
already within the last NUM_RUNS runs. Each line there is a finding that wants its cause.

The CPU and wall seconds of each file go to .ci/durations.tsv, slowest first. Both files are committed.

Exit code 0 if all tests pass, in the run or alone; 1 if one fails twice; otherwise pytest's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokenloom.tests.support.run_record import DURATIONS, OPTION, FileTime, RunRecord

ROOT = Path(__file__).resolve().parents[2]
NUM_RUNS = 20  # in which a test may be flaky once
MAX_ALONE = 30  # more failed tests are a broken tree, and none runs again
TESTS_FAILED = 1  # pytest's exit code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of the options. Unknown options go to pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT, help="with the tests and .ci")
    options, others = parser.parse_known_args(arguments)
    suite = Suite(options.folder)
    return suite.run(others)


class Suite:
    """The tests of `folder` and the two files of .ci that say how its runs went."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.durations = folder / DURATIONS
        self.flaky = folder / ".ci/flaky.txt"

    def run(self, arguments: Sequence[str]) -> int:
        """Run pytest with the arguments, then the failed tests alone. Returns the exit code."""
        number = self.last_run() + 1
        with tempfile.TemporaryDirectory() as place:
            file = Path(place, "record.json")
            code = self._pytest(*arguments, "-p", "tokenloom.tests.support.run_record", OPTION, str(file))
            if not file.exists():
                return code or TESTS_FAILED
            record = msgspec.json.decode(file.read_bytes(), type=RunRecord)
        self._write_durations(number, record.files)
        if code != TESTS_FAILED:
            return code
        errors = record.errors
        if len(errors) > MAX_ALONE:
            print(f"{len(errors)} tests failed: more than {MAX_ALONE} are not tried again alone")
            return code
        failed = [name for name in errors if self._pytest("-m", "", name)]
        is_green = not failed
        for name in failed:
            print(f"failed twice: {name} ({errors[name]})")
        for name in errors.keys() - set(failed):
            is_green &= self.note_flaky(number, name, errors[name])
        return 0 if is_green else TESTS_FAILED

    def last_run(self) -> int:
        """Return the number of the last run of the whole suite that was committed; 0 if there is none."""
        if not self.durations.exists():
            return 0
        return int(self.durations.read_text(encoding="utf-8").split("\n", 1)[0].rpartition(" ")[2])

    def _pytest(self, *arguments: str) -> int:
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.run(command, cwd=self.folder, check=False).returncode

    def _write_durations(self, number: int, files: dict[str, FileTime]) -> None:
        """Write one line a file: seconds of CPU and of the clock, tests, path."""
        lines = [f"# CPU s, wall s, tests, file: run {number}"]
        for path, used in sorted(files.items(), key=lambda each: -each[1].cpu_s):
            lines.append(f"{used.cpu_s:.1f}\t{used.wall_s:.1f}\t{used.num_tests}\t{path}")
        self.durations.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def note_flaky(self, number: int, name: str, error: str) -> bool:
        """Print and write down a flaky test. Returns False if it was flaky in one of the last runs already."""
        print(f"flaky: {name} ({error})")
        noted = self.flaky.read_text(encoding="utf-8").splitlines() if self.flaky.exists() else []
        before = [run for run, _, noted_name, _ in (line.split("\t") for line in noted) if noted_name == name]
        date = time.strftime("%Y-%m-%d", time.gmtime())
        with self.flaky.open("a", encoding="utf-8") as file:
            file.write("\t".join([str(number), date, name, error.replace("\t", " ")]) + "\n")
        recent = [run for run in before if number - int(run) < NUM_RUNS]
        if recent:
            print(f"{name} was flaky in run {recent[-1]} already, {number - int(recent[-1])} runs ago: mend its cause")
        return not recent


if __name__ == "__main__":
    sys.exit(main())
