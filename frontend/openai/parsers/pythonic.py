"""Parse Llama 3.2 and 4, Olmo 3: the whole answer is a list of calls in Python, [f(a=1), g(b="x")]."""

from __future__ import annotations

import ast
import json
import re

from ...text.markers import split_marker
from .parts import Part, call, content

START, END = "<|python_start|>", "<|python_end|>"
_BEGIN = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*)?(?:\(|$)")
_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser:
    """Parser of one answer. The answer is held while it may be a list of calls, with or without the markers START and
    END around it; any other answer is content."""

    def __init__(self) -> None:
        self._held = ""
        self._is_content = False

    def append(self, text: str) -> list[Part]:
        if self._is_content:
            return content(text)
        self._held += text
        split = split_marker(self._held, START)
        if split is None or not (begun := split[1].lstrip()) or _BEGIN.match(begun):
            return []
        self._is_content = True
        return content(self._held)

    def finish(self) -> list[Part]:
        if self._is_content:
            return []
        bare = self._held.strip().removeprefix(START).removesuffix(END).strip()
        try:
            calls = _read(bare)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return content(self._held)
        return [part for name, arguments in calls for part in call(name, arguments, "")]


def _read(text: str) -> list[tuple[str, str]]:
    """Return names and arguments (JSON text) of calls; ValueError or SyntaxError unless `text` is a list of calls with
    named arguments."""
    listed = ast.parse(text, mode="eval").body
    if not isinstance(listed, ast.List) or not listed.elts:
        raise ValueError(text)
    calls: list[tuple[str, str]] = []
    for each in listed.elts:
        if not isinstance(each, ast.Call) or each.args or not isinstance(each.func, ast.Name | ast.Attribute):
            raise ValueError(text)
        arguments = {str(keyword.arg): _value(keyword.value) for keyword in each.keywords if keyword.arg}
        calls.append((ast.unparse(each.func), json.dumps(arguments, ensure_ascii=False)))
    return calls


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(ast.literal_eval(key)): _value(value) for key, value in pairs if key}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(f"{type(value).__name__} has no form in JSON")
    return value
