"""docs/reference/glossary.md explains each concept once, in one or two sentences, by a name that the code has."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "glossary.md"
ROOMS = ("core", "frontend", "ipc", "kernels", "workers")
LINE = re.compile(r"\| ([a-z]+) \| ([A-Z].+\.) \| `(\w+)` \|")
CONCEPTS = """
request answer attempt continuation flex session caller lease
row step batch epoch generation ledger delta feature mixer
block slot arena group slab snapshot pool namespace key publication tier source object pin
fill medium span entry piece
draft mask begin jump
replica core frontend gateway host agent unit spare supervisor holding order helper blob
"""
LINES = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| (?!concept )", line)]
ENTRIES = [match.groups() for match in map(LINE.fullmatch, LINES) if match is not None]


def is_defined(name: str, sources: list[str]) -> bool:
    """Return whether a source defines a class, function, field or attribute of this name."""
    pattern = re.compile(rf"^ *(class|def) {name}\b|^ *{name}: |\w\.{name}\b", re.MULTILINE)
    return any(map(pattern.search, sources))


def test_every_concept_is_explained_once_and_in_order() -> None:
    assert len(ENTRIES) == len(LINES), "a line of a table is not parsed"
    assert [concept for concept, _, _ in ENTRIES] == CONCEPTS.split()


def test_a_meaning_is_at_most_two_sentences() -> None:
    assert [concept for concept, meaning, _ in ENTRIES if len(re.findall(r"\.(?= |$)", meaning)) > 2] == []


def test_every_name_is_defined_in_the_code() -> None:
    sources = [path.read_text(encoding="utf-8") for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert not is_defined("no_such_name", sources)
    assert [name for _, _, name in ENTRIES if not is_defined(name, sources)] == []


def test_the_other_pages_use_every_concept() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path != PAGE]
    text = "".join(path.read_text(encoding="utf-8") for path in pages).lower()
    stems = {"publication": "publi", "medium": "medi"}
    assert [concept for concept, _, _ in ENTRIES if not re.search(rf"\b{stems.get(concept, concept)}", text)] == []
