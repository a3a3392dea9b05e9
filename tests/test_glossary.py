"""docs/glossary.md and the code use the same names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"\| `(\w+)` \| (.+) \| `([\w/.]+)` \|")
TERMS = [LINE.fullmatch(line) for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()]
FOUND = [match.groups() for match in TERMS if match is not None]
# Class names that vLLM, llguidance, FlashAttention or the literature use for the same thing.
FIELD_TERMS = {
    "core": "BlockPool EngineCore Executor GrammarCompiler KVCacheManager Matcher Request Scheduler State WaitingQueue",
    "workers": "Attention DecoderLayer DecoderModel InputBatch KVCacheSpec LogitsProcessors MLP Model ModelRunner "
    "Pooler Sampler SamplingMetadata SparseMLP Worker",
    "kernels": "Activation AttentionMetadata AttentionSpec HeadNorms Norm Rotary Routing",
}


def test_every_table_line_is_parsed() -> None:
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    assert len(FOUND) == sum(line.startswith("| `") for line in lines)
    assert len({term for term, _, _ in FOUND}) == len(FOUND), "a term is listed twice"


@pytest.mark.parametrize(("term", "file"), [(term, file) for term, _, file in FOUND])
def test_every_term_is_defined_in_its_file(term: str, file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    names |= {node.target.id for node in ast.walk(tree) if _is_field(node)}  # type: ignore[attr-defined]
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert term in names


@pytest.mark.parametrize("room", FIELD_TERMS)
def test_every_public_class_has_a_field_term_or_a_glossary_line(room: str) -> None:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / room).rglob("*.py"))
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    explained = {term for term, _, _ in FOUND} | set(FIELD_TERMS[room].split())
    assert sorted(name for name in classes - explained if not name.startswith("_")) == []


def _is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
