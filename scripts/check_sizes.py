"""Print and enforce the tree's sizes: lines of each room against its budget, files of each folder, long files and
functions, the code of the tests against that of the product.

Blank lines and comments count. Triton kernels are exempt from the limit on functions.
Exit code 1 and one line for each exceeded limit.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenloom.scripts.checks.code_tokens import num_tokens

ROOT = Path(__file__).resolve().parent.parent

BUDGETS = {  # (room, file suffixes): lines, including all planned features
    ("frontend", ".py"): 35_600,
    ("core", ".py"): 15_200,
    ("workers", ".py"): 12_900,
    ("kernels", ".py"): 7_200,
    ("kernels", ".c .h"): 5_200,
    ("ipc", ".py"): 11_650,
}
MAX_FILES = 16  # of a folder
MAX_FILE_LINES = 600  # a file that is joined up to stay under a limit is worse than a long one
MAX_FUNCTION_LINES = 80
MAX_TESTS = 1.32  # tokens of the tests' code by those of the product's


def files(folder: Path, kinds: str = ".py") -> list[Path]:
    """Return the files of these kinds in a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix in kinds.split())


def num_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


@cache
def functions(path: Path) -> list[tuple[str, int]]:
    """Return the name and length of each function but Triton kernels."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_kernel = any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
            if not is_kernel and node.end_lineno is not None:
                found.append((node.name, node.end_lineno - node.lineno + 1))
    return found


def offences(root: Path = ROOT) -> Iterator[str]:
    """Yield one line for each exceeded limit of the tree in `root`."""
    for (room, kinds), budget in BUDGETS.items():
        total = sum(map(num_lines, files(root / room, kinds)))
        if total > budget:
            yield f"{room} has {total} lines of {kinds}, its budget is {budget}"
    paths = [path for room in sorted({room for room, _ in BUDGETS}) for path in files(root / room)]
    for folder, count in Counter(path.parent.relative_to(root) for path in paths).items():
        if count > MAX_FILES:
            yield f"{folder} has {count} files, at most {MAX_FILES}: give it sub-folders"
    for path in paths:
        name = path.relative_to(root)
        if num_lines(path) > MAX_FILE_LINES:
            yield f"{name} has {num_lines(path)} lines, at most {MAX_FILE_LINES}: find its second noun"
        for function, length in functions(path):
            if length > MAX_FUNCTION_LINES:
                yield f"{name}: {function} has {length} lines, at most {MAX_FUNCTION_LINES}"


def offences_of_tests(root: Path = ROOT) -> Iterator[str]:
    """Yield a line if the tests have more code than they may. It takes seconds to count it."""
    product, tests = code_tokens(root)
    if tests > MAX_TESTS * product:
        yield f"the tests have {tests} tokens of code, {tests / product:.3f} of the product's, at most {MAX_TESTS}"


@cache
def code_tokens(root: Path) -> tuple[int, int]:
    """Return the tokens of code of all rooms, and of the tests."""
    product = sum(num_tokens(path) for room, kinds in BUDGETS for path in files(root / room, kinds))
    return product, sum(map(num_tokens, files(root / "tests")))


def report() -> Iterator[str]:
    """Yield one line a room: lines and budget, files, the fullest folder, the longest file and function."""
    for (room, kinds), budget in BUDGETS.items():
        paths = files(ROOT / room, kinds)
        line = f"{room:9} {kinds:6} {sum(map(num_lines, paths)):6} lines of {budget:6}, {len(paths):3} files"
        if kinds == ".py":
            (folder, count), *_ = Counter(path.parent.relative_to(ROOT) for path in paths).most_common(1)
            longest = max(paths, key=num_lines)
            name, length = max((each for path in paths for each in functions(path)), key=lambda each: each[1])
            line += f"; most in {folder} ({count}); longest {longest.relative_to(ROOT)} ({num_lines(longest)})"
            line += f", {name} ({length})"
        yield line


def report_of_tests() -> str:
    product, tests = code_tokens(ROOT)
    return f"product {product} tokens of code, tests {tests}: {tests / product:.3f} of it"


if __name__ == "__main__":
    print(*report(), report_of_tests(), sep="\n")
    found = [*offences(), *offences_of_tests()]
    print("\n".join(found) or "sizes: within the limits")
    sys.exit(bool(found))
