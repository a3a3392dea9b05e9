"""Enforce a limit on the free relatives per 1,000 words of docstrings and comments in each room.

The words in RELATIVES are counted because a sentence that leans on them has usually lost its noun. The count is a
ratchet, not the aim: `--sample N` prints N docstrings with only their signatures (a method's with its class, a class's
with its fields), drawn by a fixed seed, so that a reader without the code can describe each function.
Exit code 1 and one line for each room above its limit.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"frontend": 2.0, "core": 2.0, "workers": 2.0, "kernels": 2.0, "ipc": 2.0, "tests": 2.0, "scripts": 2.0}
RELATIVES = re.compile(r"\b(?:what|who|whose|whom)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> Iterator[tuple[Documented, ast.ClassDef | None, str]]:
    """Yield each module, class and function that has a docstring, with the class of a method, and the docstring."""
    tree = ast.parse(source)
    classes = {node: each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) for node in each.body}
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, classes.get(node) if isinstance(node, ast.stmt) else None, text


def prose(path: Path) -> str:
    """Return all docstrings and comments of a Python file, or all comments of a C file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return " ".join(C_COMMENT.findall(source))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return " ".join([text for _, _, text in docstrings(source)] + comments)


def files(room: str) -> list[Path]:
    """Return the Python and C files of a room, sorted."""
    return sorted(path for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".c", ".h"))


def share(paths: list[Path]) -> float:
    """Return the free relatives per 1,000 words of prose."""
    text = " ".join(map(prose, paths))
    return 1000 * len(RELATIVES.findall(text)) / max(len(WORD.findall(text)), 1)


def signature(node: Documented, owner: ast.ClassDef | None) -> list[str]:
    """Return the lines that show a definition: of a class its bases and fields, of a method its class `owner` first."""
    if isinstance(node, ast.Module):
        return ["module"]
    if isinstance(node, ast.ClassDef):
        fields = [f"  {ast.unparse(each)}" for each in node.body if isinstance(each, ast.AnnAssign)]
        return [f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):", *fields]
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{word} {node.name}({ast.unparse(node.args)}){returns}"
    return [signature(owner, None)[0], f"  {line}"] if owner else [line]


@functools.cache
def product_docstrings() -> list[tuple[Path, Documented, ast.ClassDef | None, str]]:
    """Return the docstrings of the product's rooms, as `docstrings` yields them, each with its file."""
    return [
        (path.relative_to(ROOT), node, owner, text)
        for room in ("frontend", "core", "workers", "kernels", "ipc")
        for path in files(room)
        if path.suffix == ".py"
        for node, owner, text in docstrings(path.read_text(encoding="utf-8"))
    ]


def sample(number: int, seed: int) -> Iterator[str]:
    """Yield `number` docstrings of the product's rooms, with file, line and signature."""
    for path, node, owner, text in random.Random(seed).sample(product_docstrings(), number):
        yield "\n  ".join((f"{path}:{getattr(node, 'lineno', 1)}", *signature(node, owner), text)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="print N docstrings and end")
    parser.add_argument("--seed", type=int, default=18, help="of the sample (default: %(default)s)")
    parser.add_argument("--files", metavar="ROOM", help="print the share of each file of a room, worst last, and end")
    arguments = parser.parse_args()
    if arguments.sample:
        print("\n".join(sample(arguments.sample, arguments.seed)))
        return 0
    if arguments.files:
        for value, path in sorted((share([path]), path) for path in files(arguments.files)):
            print(f"{value:6.1f} {path.relative_to(ROOT)}")
        return 0
    shares = {room: share(files(room)) for room in LIMITS}
    print(", ".join(f"{room} {value:.1f}" for room, value in shares.items()), "free relatives per 1,000 words")
    offences = [
        f"{room}: {value:.1f}, at most {LIMITS[room]}" for room, value in shares.items() if value > LIMITS[room]
    ]
    print("\n".join(offences), end="\n" if offences else "", file=sys.stderr)
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
