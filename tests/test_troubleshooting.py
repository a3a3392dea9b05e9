"""Every message quoted in docs/operate/troubleshooting.md is in the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "frontend", "ipc", "kernels", "workers")
PAGE = ROOT / "docs/operate/troubleshooting.md"


@cache
def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for room in ROOMS for path in (ROOT / room).rglob("*.py")]


def texts(source: str) -> Iterator[str]:
    """Yield every string of a source, with formatted values, %s and the like as `…`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(\.\d+)?[sd]", "…", node.value)


def is_in_sources(message: str) -> bool:
    words = set(re.findall(r"\w+", message))
    pattern = re.compile(".*?".join(map(re.escape, message.split("…"))), re.DOTALL)
    candidates = (source for source in sources() if all(word in source for word in words))
    return any(pattern.search(text) for source in candidates for text in texts(source))


def test_every_quoted_message_is_in_the_sources() -> None:
    quoted = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quoted) > 25 and not is_in_sources("the moon is full")
    assert [each for each in quoted if not is_in_sources(each)] == []
