"""Parser of tool calls of Llama 3.2 and 4 and Olmo 3: the whole answer is a Python list of calls, [f(a=1),
g(b="x")]."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import warnings

from .markers import split_marker
from .parts import Part, call, content, is_object

START, END = "<|python_start|>", "<|python_end|>"
MAX_HEAD = 512  # most characters before the first bracket of a call
_BEGIN = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*)?(?:\(|\Z)")
_NAME = re.compile(r"\w+(?:\.\w+)*")
_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser:
    """Parser of one answer. The answer is held while it may be a list of calls, with or without the markers START and
    END around it; any other answer is content."""

    markers = (START, END)

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_list = self._is_content = False  # both False: not decided yet

    def append(self, text: str) -> list[Part]:
        if self._is_content:
            return content(text)
        self._held.append(text)
        if self._is_list:
            return []
        held = "".join(self._held)
        split = split_marker(held, START)
        if split is None or not ((begun := split[1].lstrip()) or len(held) > MAX_HEAD):
            return []
        begin = _BEGIN.match(begun[:MAX_HEAD])
        self._is_list = begin is not None and begin[0].endswith("(")
        self._is_content = begin is None or not (self._is_list or len(begun) < MAX_HEAD)
        return content(held) if self._is_content else []

    def finish(self) -> list[Part]:
        if self._is_content:
            return []
        held = "".join(self._held)
        try:
            calls = _read(held.strip().removeprefix(START).removesuffix(END).strip())
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, tokenize.TokenError):
            return content(held)
        return [part for name, arguments in calls for part in call(name, arguments, "")]


def _read(text: str) -> list[tuple[str, str]]:
    """Return the names and the arguments (JSON text) of calls. ValueError, or another error of Python's parser, unless
    `text` is only a list of calls with named arguments, each given once and with a value that JSON can represent."""
    with warnings.catch_warnings(action="ignore"):  # warnings about escapes such as \d would print the text
        listed = ast.parse(text, mode="eval").body
    if not isinstance(listed, ast.List) or not listed.elts or _has_comment(text):
        raise ValueError(text)
    calls: list[tuple[str, str]] = []
    for each in listed.elts:
        if not isinstance(each, ast.Call) or each.args or not _NAME.fullmatch(name := ast.unparse(each.func)):
            raise ValueError(text)
        keys = [keyword.arg for keyword in each.keywords]
        if None in keys or len(set(keys)) < len(keys):
            raise ValueError(text)
        arguments = {str(keyword.arg): _value(keyword.value) for keyword in each.keywords}
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # ValueError beyond float64
        if not is_object(written):
            raise ValueError(text)
        calls.append((name, written))
    return calls


def _has_comment(text: str) -> bool:
    """Return whether Python text has comments, which would be lost in the calls."""
    lines = io.StringIO(text).readline
    return "#" in text and any(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(lines))


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [str(ast.literal_eval(key)) for key in node.keys if key]
        if len(set(keys)) < len(node.values):  # a repeated key, or ** of another dictionary
            raise ValueError(f"{len(keys)} keys for {len(node.values)} values")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(f"{type(value).__name__} has no form in JSON")
    return value
