"""Print and enforce the tree's sizes. Numbers that may only fall stand in scripts/checks/ratchets.toml.

    python scripts/checks/sizes.py                    the check, and lines for the file where a number has fallen
    python scripts/checks/sizes.py --beside FOLDER    the sizes of another project's Python files beside ours

Code is counted in tokens (scripts/checks/code_tokens.py), since lines can be packed. Triton kernels are exempt from the
limit on functions. Exit code 1 and one line for each exceeded limit.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median, quantiles

import msgspec

from tokenloom.scripts.checks.code_tokens import num_tokens

ROOT = Path(__file__).resolve().parents[2]
RATCHETS = "scripts/checks/ratchets.toml"

ROOMS = ("frontend", "core", "workers", "kernels", "ipc")
MAX_FILES = 16  # of a folder
MAX_FILE_LINES = 600
MAX_FILE_TOKENS = 3_000
MAX_FUNCTION_LINES = 80

FEATURES = {  # words that name a feature of a step, by the file that shall know none
    "core/scheduling/scheduler.py": re.compile(
        "adapter|blob|copies|draft|encod|grammar|isolat|media|medium|offload|pause|specul|tier"
    ),
    "workers/model_runner.py": re.compile("adapter|fills|media|entries|copies|pool"),
}


class Ratchets(msgspec.Struct, forbid_unknown_fields=True):
    """Numbers by place, each of which may only fall."""

    tokens: dict[str, int]  # of code, by room, "kernels C" being its C, "scripts" and "tests" ours
    long_files: dict[str, int]  # tokens of files that have more than MAX_FILE_TOKENS
    packed_calls: dict[str, int]  # f(*(a, b)), or f(*name) of such a group that the same function made, by room
    paired_assignments: dict[str, int]  # a, b = x, y, by room
    conditional_expressions: dict[str, int]  # x if y else z, by room
    feature_lines: dict[str, int]  # lines of code that name a feature of a step, by file


def files(folder: Path, kinds: str = ".py") -> list[Path]:
    """Return the files of these kinds in a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix in kinds.split())


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


@cache
def tokens_of(path: Path) -> int:
    return num_tokens(path)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = ast.walk(parsed(path))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function; 0 for Triton's kernels, which may be long."""
    is_kernel = any("triton.jit" in ast.unparse(each) for each in function.decorator_list)
    return 0 if is_kernel or function.end_lineno is None else function.end_lineno - function.lineno + 1


def measure(root: Path = ROOT) -> Ratchets:
    """Return the numbers of the tree in `root`."""
    by_room = {room: files(root / room) for room in ROOMS}
    counted = by_room | {
        "kernels C": files(root / "kernels", ".c .h"),
        "scripts": files(root / "scripts"),
        "tests": files(root / "tests"),
    }
    return Ratchets(
        tokens={place: sum(map(tokens_of, paths)) for place, paths in counted.items()},
        long_files={
            path.relative_to(root).as_posix(): tokens_of(path)
            for paths in by_room.values()
            for path in paths
            if tokens_of(path) > MAX_FILE_TOKENS
        },
        packed_calls={room: sum(map(num_packed_calls, paths)) for room, paths in by_room.items()},
        paired_assignments={room: sum(map(num_paired_assignments, paths)) for room, paths in by_room.items()},
        conditional_expressions={room: sum(map(num_conditionals, paths)) for room, paths in by_room.items()},
        feature_lines={name: num_lines_naming(words, root / name) for name, words in FEATURES.items()},
    )


def num_packed_calls(path: Path) -> int:
    """Count starred arguments that are a group of values, `*(a, b)`, or the name of one or its slice, which the same
    function assigns."""
    stars = set[ast.Starred]()  # a nested function is walked with the one around it, too
    for function in functions(path):
        nodes = list(ast.walk(function))
        groups = {name for node in nodes for name, value in assignments(node) if is_group(value)}
        for star in (each for node in nodes if isinstance(node, ast.Call) for each in node.args):
            if isinstance(star, ast.Starred):
                value = star.value.value if isinstance(star.value, ast.Subscript) else star.value
                if is_group(value) or (isinstance(value, ast.Name) and value.id in groups):
                    stars.add(star)
    return len(stars)


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that an assignment binds, each with its value; of `a, b = x, y` both."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id, node.value
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)  # `*rest` ends the pairs
            yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def is_group(value: ast.expr) -> bool:
    """Return whether this is a literal of fixed elements, not a sequence of equal things: an empty list that grows,
    other sequences joined, the words of a command."""
    if not isinstance(value, ast.Tuple | ast.List):
        return False
    elements = [each for each in value.elts if not isinstance(each, ast.Starred)]
    return not all(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in elements
    )


def num_paired_assignments(path: Path) -> int:
    """Count assignments of several values to as many targets."""
    assigned = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Assign))
    return sum(isinstance(each.value, ast.Tuple) and isinstance(each.targets[0], ast.Tuple) for each in assigned)


def num_conditionals(path: Path) -> int:
    return sum(isinstance(node, ast.IfExp) for node in ast.walk(parsed(path)))


def num_lines_naming(words: re.Pattern[str], path: Path) -> int:
    """Count the lines of a file with a name in which these words occur; comments and strings are not looked at."""
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    return len({each.start[0] for each in tokens if each.type == tokenize.NAME and words.search(each.string)})


def read_ratchets(root: Path = ROOT) -> Ratchets:
    return msgspec.toml.decode((root / RATCHETS).read_bytes(), type=Ratchets)


def compare(found: Ratchets, held: Ratchets) -> Iterator[tuple[bool, str]]:
    """Yield, for each number that is not the held one, whether it is above it, and a line about it."""
    for name in Ratchets.__struct_fields__:
        now: dict[str, int] = getattr(found, name)
        before: dict[str, int] = getattr(held, name)
        for place in sorted(now.keys() | before.keys()):
            most = MAX_FILE_TOKENS if name == "long_files" else 0
            count, limit = now.get(place, most), before.get(place, most)
            if count > limit:
                yield True, f"{place} has {count} {name.replace('_', ' ')}, at most {limit}: see {RATCHETS}"
            elif count < limit:
                yield False, f"{RATCHETS}: [{name}] {place} = {count}, was {limit}"


def offences(root: Path = ROOT) -> Iterator[str]:
    """Yield one line for each exceeded limit of folders, files and functions in `root`."""
    paths = [path for room in ROOMS for path in files(root / room)]
    for folder, count in Counter(path.parent.relative_to(root) for path in paths).items():
        if count > MAX_FILES:
            yield f"{folder} has {count} files, at most {MAX_FILES}: give it sub-folders"
    for path in paths:
        name = path.relative_to(root)
        if num_lines(path) > MAX_FILE_LINES:
            yield f"{name} has {num_lines(path)} lines, at most {MAX_FILE_LINES}: find its second noun"
        for function in functions(path):
            if length(function) > MAX_FUNCTION_LINES:
                yield f"{name}: {function.name} has {length(function)} lines, at most {MAX_FUNCTION_LINES}"


def report(found: Ratchets) -> Iterator[str]:
    """Yield one line a room: tokens, files, the fullest folder, the longest file and function."""
    for room in ROOMS:
        paths = files(ROOT / room)
        (folder, count), *_ = Counter(path.parent.relative_to(ROOT) for path in paths).most_common(1)
        longest = max(paths, key=tokens_of)
        lines, name = max((length(each), each.name) for path in paths for each in functions(path))
        yield (
            f"{room:9} {found.tokens[room]:7} tokens, {len(paths):3} files; most in {folder} ({count}); "
            f"longest {longest.relative_to(ROOT)} ({tokens_of(longest)}), {name} ({lines} lines)"
        )
    tests, scripts = found.tokens["tests"], found.tokens["scripts"]
    product = sum(found.tokens.values()) - tests - scripts
    yield f"product {product} tokens with C, scripts {scripts}, tests {tests}: {tests / product:.3f} of the product"


def describe(name: str, paths: Sequence[Path]) -> str:
    """Return one line of the sizes of a project's Python files."""
    counts = sorted(tokens_of(path) for path in paths)
    tenth = quantiles(counts, n=10)[-1]
    lines = sum(map(num_lines, paths))
    packed = sum(map(num_packed_calls, paths))
    paired = sum(map(num_paired_assignments, paths))
    return (
        f"{name:20} {sum(counts):7} tokens; a file has {median(counts):.0f} in the median, {tenth:.0f} in the ninth "
        f"decile, {counts[-1]} at most, a line {sum(counts) / lines:.1f}; {packed} calls f(*packed), "
        f"{1000 * paired / lines:.1f} assignments a, b = x, y in 1,000 lines"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="a folder with Python files")
    options = parser.parse_args()
    if options.beside is not None:
        print(describe(options.beside.name, files(options.beside)))
        print(describe("ours", [path for room in ROOMS for path in files(ROOT / room)]))
        return 0
    found = measure()
    compared = list(compare(found, read_ratchets()))
    print(*report(found), *(line for _, line in compared), sep="\n")
    broken = [*offences(), *(line for is_above, line in compared if is_above)]
    print("\n".join(broken) if broken else "sizes: within the limits")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
