"""No text depends on the locale: each call that reads or writes text names its encoding."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("core", "frontend", "ipc", "kernels", "scripts", "workers")
TEXT_METHODS = ("read_text", "write_text")
SUBPROCESS = ("Popen", "run", "check_output")
CALLED = re.compile(r"\b(open|fdopen|read_text|write_text)\(|subprocess")


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call in a source that has one of interest, with the last part of the called name."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if CALLED.search(text) else ():
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            yield node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node


def mode_of(name: str, call: ast.Call) -> str:
    """Return the mode of a call that opens a file: a method's first argument, a function's second."""
    is_method = name == "open" and isinstance(call.func, ast.Attribute)
    named = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    modes = named or call.args[0 if is_method else 1 :][:1]
    return modes[0].value if modes and isinstance(modes[0], ast.Constant) and isinstance(modes[0].value, str) else "r"


def has_mode(call: ast.Call) -> bool:
    """Return whether a method named open belongs to a path."""
    first = call.args[0] if call.args else None
    is_mode = isinstance(first, ast.Constant) and isinstance(first.value, str) and set(first.value) <= set("rwxab+t")
    return is_mode or "mode" in {keyword.arg for keyword in call.keywords}


def is_text(name: str, call: ast.Call) -> bool:
    given = {keyword.arg for keyword in call.keywords}
    if name in SUBPROCESS:
        return "text" in given
    if name in ("open", "fdopen"):
        is_function = isinstance(call.func, ast.Name) or name == "fdopen"
        return (is_function or has_mode(call)) and "b" not in mode_of(name, call)
    return name in TEXT_METHODS


def test_all_text_io_names_its_encoding() -> None:
    sources = [path for place in PLACES for path in (ROOT / place).rglob("*.py")] + [ROOT / "setup.py"]
    silent = [
        f"{path.relative_to(ROOT)}:{call.lineno} {name}"
        for path in sources
        for name, call in calls(path)
        if is_text(name, call) and not {"encoding", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert silent == []
