"""Count the tokens of code of a file: lines can be packed, tokens cannot.

Python is read by `tokenize`, without comments, docstrings, newlines and indentation; C by its words and signs, without
comments.
"""

from __future__ import annotations

import ast
import re
import tokenize
from pathlib import Path

NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
C_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\w+|[^\w\s]')


def num_tokens(path: Path) -> int:
    """Return the number of tokens of a Python file or of one of C."""
    if path.suffix != ".py":
        return len(C_TOKEN.findall(C_COMMENT.sub(" ", path.read_text(encoding="utf-8"))))
    docstrings = set(_docstring_places(ast.parse(path.read_bytes())))
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in NOT_CODE]
    return sum(token.start not in docstrings for token in tokens)


def _docstring_places(module: ast.Module) -> list[tuple[int, int]]:
    """Return the line and column of each docstring."""
    bodies = [
        node.body
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    heads = [body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)]
    return [
        (head.lineno, head.col_offset)
        for head in heads
        if isinstance(head, ast.Constant) and isinstance(head.value, str)
    ]
