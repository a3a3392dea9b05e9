"""Break the code in known ways and show that the default tests go red.

    python scripts/checks/try_mutants.py                 all mutants: some 20 minutes of CPU time
    python scripts/checks/try_mutants.py core workers    those of two rooms
    python scripts/checks/try_mutants.py --left          shows too that the laws that left the default run went red

A mutant in scripts/checks/mutants/ROOM.toml replaces one text of one file, in a copy of the tree:

    [[mutant]]
    file = "core/kv/block_pool.py"
    old = "if block.num_users == 0:"                      # stands there once
    new = "if block.num_users <= 1:"
    red = ["tests/core/kv/test_block_pool.py::test_x"]    # laws of the default run, each of which goes red
    left = ["tests/core/test_engine.py::test_y"]          # optional: a law that left the default run and was red too

Exit code 1 and one line for each mutant without its text in the file, or that a law named there survives.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tokenloom.tests.support.run_record import OPTION, RunRecord

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts/checks/mutants"
LIMIT_S = 600  # of the tests of one mutant: it may hang them

# Python takes a compiled file for current if size and second of change are those of the source. No two texts of a file
# may have the same second, so that compiled files can be kept from one mutant to the next.
_changed_at = itertools.count(int(time.time()) + 1)


class Mutant(msgspec.Struct, forbid_unknown_fields=True):
    """One change of one file, the laws that go red, and those that have left the default run and did."""

    file: str
    old: str
    new: str
    red: list[str]
    left: list[str] = []


class Renamed(msgspec.Struct, forbid_unknown_fields=True):
    """A law that another name or file has now, alone or together with others."""

    old: str
    new: str


class Mutants(msgspec.Struct, forbid_unknown_fields=True):
    """The content of one file or of all."""

    mutant: list[Mutant] = []
    renamed: list[Renamed] = []


def read_mutants(rooms: Sequence[str] = ()) -> Mutants:
    """Read the mutants of some rooms or of all."""
    found = Mutants()
    for path in sorted(FOLDER.glob("*.toml")):
        if not rooms or path.stem in rooms:
            of_room = msgspec.toml.decode(path.read_bytes(), type=Mutants)
            found = Mutants(found.mutant + of_room.mutant, found.renamed + of_room.renamed)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help="files in scripts/checks/mutants, without .toml")
    parser.add_argument("--left", action="store_true", help="run the laws that left the default run too")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    options = parser.parse_args()
    mutants = read_mutants(options.rooms).mutant
    num_faults = 0
    for mutant, faults in try_all(mutants, options.processes, with_left=options.left):
        num_faults += len(faults)
        for fault in faults:
            print(f"{mutant.file}: {mutant.new.strip()!r}: {fault}", flush=True)
    print(f"{len(mutants)} mutants tried, {num_faults} faults")
    return int(num_faults > 0)


def try_all(mutants: Sequence[Mutant], num_processes: int, *, with_left: bool) -> Iterator[tuple[Mutant, list[str]]]:
    """Yield each mutant with its faults, in order. Each process has a copy of the tree, with its compiled files."""
    trees = queue.SimpleQueue[Path]()

    def faults_of(mutant: Mutant) -> list[str]:
        tree = trees.get()
        try:
            return list(try_mutant(tree, mutant, with_left=with_left))
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(num_processes) as threads:
        for number in range(num_processes):
            tree = Path(place, str(number), "tokenloom")
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "*.egg-info"))
            trees.put(tree)
        yield from zip(mutants, threads.map(faults_of, mutants), strict=True)


def try_mutant(tree: Path, mutant: Mutant, *, with_left: bool) -> Iterator[str]:
    """Yield the faults of a mutant, tried in a copy of the tree."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(mutant.old) != 1:
        yield f"its old text stands there {text.count(mutant.old)} times"
        return
    _write(path, text.replace(mutant.old, mutant.new))
    try:
        yield from survivors(tree, mutant.red)
        if with_left and mutant.left:
            yield from (f"{fault}, though it left" for fault in survivors(tree, mutant.left, "-m", ""))
    finally:
        _write(path, text)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    changed_at = next(_changed_at)
    os.utime(path, (changed_at, changed_at))


def survivors(tree: Path, laws: Sequence[str], *arguments: str) -> list[str]:
    """Run laws and return one fault for each of which no case fails: none if the run hangs or its process is killed."""
    with tempfile.TemporaryDirectory() as place:
        record = Path(place, "record.json")
        plugin = ["-p", "tokenloom.tests.support.run_record", OPTION, str(record)]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, *arguments, *laws]
        environment = os.environ | {"PYTHONPATH": str(tree.parent)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            run = subprocess.run(command, cwd=tree, env=environment, timeout=LIMIT_S, capture_output=True, check=False)
        except subprocess.TimeoutExpired:
            return []
        if run.returncode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            return [f"{law} is not found, or another one is not" for law in laws]
        if not record.exists():
            return []
        failed = msgspec.json.decode(record.read_bytes(), type=RunRecord).errors
    return [f"{law} survives it" for law in laws if not any(_is_of(test, law) for test in failed)]


def _is_of(test: str, law: str) -> bool:
    """Return whether a failed test is a case of the law, or the whole file that holds it."""
    return test == law.partition("::")[0] or test.partition("[")[0] == law


if __name__ == "__main__":
    sys.exit(main())
