"""Every message quoted in docs/troubleshooting.md is in the sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "frontend", "ipc", "kernels", "workers")
PAGE = ROOT / "docs" / "troubleshooting.md"


def quoted() -> list[str]:
    return re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def texts() -> list[str]:
    """Return every string of the sources, with formatted values, %s and the like as `…`."""
    found = []
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d+)?[sd]", "…", node.value))
    return found


def test_every_quoted_message_is_in_the_sources() -> None:
    known = texts()
    assert len(quoted()) > 25
    patterns = [(each, re.compile(".*?".join(map(re.escape, each.split("…"))), re.DOTALL)) for each in quoted()]
    assert [each for each, pattern in patterns if not any(pattern.search(text) for text in known)] == []


def test_a_message_missing_from_the_sources_is_detected() -> None:
    assert not any("the moon is full" in text for text in texts())
