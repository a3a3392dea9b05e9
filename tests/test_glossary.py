"""docs/reference/glossary.md and the code use the same names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"\| `(\w+)` \| (.+) \| `([\w/.]+)` \|")
TERMS = [
    LINE.fullmatch(line) for line in (ROOT / "docs/reference/glossary.md").read_text(encoding="utf-8").splitlines()
]
FOUND = [match.groups() for match in TERMS if match is not None]
# Class names that vLLM, llguidance, FlashAttention or the literature use for the same thing.
FIELD_TERMS = {
    "core": "BlockPool EngineCore Executor GrammarCompiler KVCacheManager Matcher Request Scheduler State WaitingQueue",
    "workers": "Attention DecoderLayer DecoderModel InputBatch KVCacheSpec LogitsProcessors MLP Model ModelRunner "
    "Pooler Sampler SamplingMetadata SparseMLP Worker",
    "kernels": "Activation AttentionMetadata AttentionSpec HeadNorms Norm Rotary Routing",
}


def test_every_term_is_listed_once_and_defined_in_its_file() -> None:
    lines = (ROOT / "docs/reference/glossary.md").read_text(encoding="utf-8").splitlines()
    assert len(FOUND) == sum(line.startswith("| `") for line in lines), "a line of the table is not parsed"
    assert len({term for term, _, _ in FOUND}) == len(FOUND), "a term is listed twice"
    text_by_file = {file: (ROOT / file).read_text(encoding="utf-8") for _, _, file in FOUND}
    assert [(term, file) for term, _, file in FOUND if not is_defined(term, text_by_file[file])] == []


def is_defined(term: str, text: str) -> bool:
    """Return whether a source defines a class, function, field or attribute of this name."""
    return re.search(rf"^ *(class|def) {term}\b|^ *{term}: |\w\.{term}\b", text, re.MULTILINE) is not None


@pytest.mark.parametrize("room", FIELD_TERMS)
def test_every_public_class_has_a_field_term_or_a_glossary_line(room: str) -> None:
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / room).rglob("*.py"))
    classes = {name for text in texts for name in re.findall(r"^ *class ([A-Za-z]\w*)[(:\[]", text, re.MULTILINE)}
    assert sorted(classes - {term for term, _, _ in FOUND} - set(FIELD_TERMS[room].split())) == []
