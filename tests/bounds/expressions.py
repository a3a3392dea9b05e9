"""Finds every regular expression in the sources of the rooms that read texts of callers."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = ("frontend", "ipc", "core")
ANYWHERE = frozenset(("search", "finditer", "findall", "split", "sub", "subn"))  # methods that try each position
METHODS = ANYWHERE | {"match", "fullmatch"}


class Expression(NamedTuple):
    """A regular expression. `place`: its file, and its name or the function that uses it and the number there."""

    place: str
    source: ast.expr
    methods: frozenset[str]  # by which it is used

    def patterns(self) -> list[re.Pattern[Any]]:
        """Return the compiled expression, if it does not depend on values that only a run knows."""
        path, _, name = self.place.partition(" ")
        module = importlib.import_module("tokenloom." + path.removesuffix(".py").replace("/", "."))
        found = getattr(module, name, None)
        if isinstance(found, re.Pattern):
            return [found]
        return [re.compile(self.source.value)] if isinstance(self.source, ast.Constant) else []


def expressions(root: Path = ROOT) -> Iterator[Expression]:
    """Yield every call of a function of `re` that takes an expression."""
    paths = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    assert not [path for path, tree in trees.items() if _hides_re(tree)], "re is imported by its name alone"
    uses = _uses(trees.values())
    for path, tree in trees.items():
        names = _names(tree)
        counts = dict[str, int]()
        for function, call in _calls(tree, ""):
            assert isinstance(call.func, ast.Attribute)
            name = names.get(id(call))
            if name is None:
                counts[function] = counts.get(function, 0) + 1
                name = f"{function}#{counts[function]}"
            methods = frozenset((call.func.attr,))
            if call.func.attr == "compile":
                methods = uses.get(name, frozenset())
            yield Expression(f"{path.relative_to(root)} {name}", call.args[0], methods)


def _hides_re(tree: ast.Module) -> bool:
    """Return whether a file has the functions of `re`, or those of `regex`, under names that are not found here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("re", "regex"):
            return True
        if isinstance(node, ast.Import) and any(
            each.name == "regex" or (each.name == "re" and each.asname) for each in node.names
        ):
            return True
    return False


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of functions of `re`, with the function of ours around them."""
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call) and isinstance(called := child.func, ast.Attribute):
            is_re = isinstance(called.value, ast.Name) and called.value.id == "re"
            if is_re and called.attr in METHODS | {"compile"}:
                yield inner, child
        yield from _calls(child, inner)


def _names(tree: ast.Module) -> dict[int, str]:
    """Return the names of the expressions that a module assigns to its constants, by the id of the call."""
    names: dict[int, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        else:
            pairs = [(target, value)]
        names |= {
            id(call): each.id for each, call in pairs if isinstance(each, ast.Name) and isinstance(call, ast.Call)
        }
    return names


def _uses(trees: Iterable[ast.Module]) -> dict[str, frozenset[str]]:
    """Return the methods that are called on each name."""
    uses = defaultdict[str, set[str]](set)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            for each in ast.walk(node.value):
                if isinstance(each, ast.Name):
                    uses[each.id].add(node.attr)
    return {name: frozenset(methods) for name, methods in uses.items()}
