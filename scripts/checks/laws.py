"""List the laws that have left the default run between two commits, with the one that holds each now.

    python scripts/checks/laws.py OLD NEW

A law is a test function. It has left if it is gone or runs at night alone. It is held if a mutant in
scripts/checks/mutants/ turned it red and turns a law of the default run red too (scripts/checks/try_mutants.py shows
that), or if `[[renamed]]` there, or the same name in another file, says where it is now.

Exit code 1 if a law has left that nothing holds.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator

from tokenloom.scripts.checks.try_mutants import ROOT, Mutants, read_mutants

NOT_DEFAULT = ("pytest.mark.nightly", "pytest.mark.gpu", "pytest.mark.slow")  # slow: an older name of nightly


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="a later one")
    options = parser.parse_args()
    old, new = set(laws_of(options.old)), set(laws_of(options.new))
    left, mutants = sorted(old - new), read_mutants()
    holders = {law: find_holder(law, new, mutants) for law in left}
    for law, holder in holders.items():
        print(f"{law}\n    {holder or 'is held by nothing'}")
    num_unheld = sum(holder is None for holder in holders.values())
    print(f"{len(old)} laws before, {len(new)} now, {len(left)} left, {num_unheld} of them held by nothing")
    return int(num_unheld > 0)


def find_holder(law: str, laws: set[str], mutants: Mutants) -> str | None:
    """Describe the holder of a law that left; None if it has none."""
    for renamed in mutants.renamed:
        if renamed.old == law and renamed.new in laws:
            return f"is now {renamed.new}"
    name = law.partition("::")[2]
    moved = [each for each in laws if each.endswith(f"::{name}")]
    if len(moved) == 1:
        return f"is now {moved[0]}"
    for mutant in mutants.mutant:
        holders = [each for each in mutant.red if each in laws]
        if law in mutant.left and holders:
            return f"is held by {', '.join(holders)}: red as it was for another {mutant.file} ({mutant.new.strip()!r})"
    return None


def laws_of(commit: str) -> Iterator[str]:
    """Yield the default laws of a commit as PATH::NAME."""
    archive = subprocess.run(["git", "archive", commit, "tests"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            file = files.extractfile(member) if member.name.rpartition("/")[2].startswith("test_") else None
            if file is not None and member.name.endswith(".py"):
                yield from (f"{member.name}::{name}" for name in default_tests(file.read().decode()))


def default_tests(source: str) -> Iterator[str]:
    """Yield the names of the test functions of a file that the default run takes, whole or some of their cases."""
    module = ast.parse(source)
    assigned = [node for node in module.body if isinstance(node, ast.Assign)]
    marks = [ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    if any(mark in text for text in marks for mark in NOT_DEFAULT):
        return
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
            continue
        if not any(ast.unparse(each).startswith(NOT_DEFAULT) for each in node.decorator_list):
            yield node.name


if __name__ == "__main__":
    sys.exit(main())
