"""docs/reference/conformance.md lists every field with its endpoints, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tokenloom.frontend.forms.anthropic.request_body import CountTokensRequest, MessagesRequest
from tokenloom.frontend.forms.openai.embedding_body import EmbeddingRequest
from tokenloom.frontend.forms.openai.response_body import ResponsesRequest
from tokenloom.frontend.forms.openai.schema import ChatRequest, CompletionRequest
from tokenloom.frontend.forms.openai.transcription_body import TranscriptionRequest, TranslationRequest

TESTS = Path(__file__).parents[4]
TEXT = (TESTS.parent / "docs/reference/conformance.md").read_text()
BODIES = (  # the columns' order
    *(CompletionRequest, ChatRequest, ResponsesRequest, EmbeddingRequest, MessagesRequest),
    *(TranscriptionRequest, TranslationRequest),
)
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in TEXT.splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}
NAMED = set(re.findall(r"`tests/([\w/]+/test_\w+\.py)::(test_\w+)(?:\[(\w+)\])?`", TEXT))


def test_the_table_has_every_field_at_its_endpoints() -> None:
    served = [{field.name for field in msgspec.structs.fields(body)} for body in BODIES]
    assert set.union(*served) <= ROWS.keys()
    assert issubclass(MessagesRequest, CountTokensRequest), "it has no fields of its own"
    for name, (origin, *cells, _, _) in ROWS.items():
        assert origin in ("OpenAI", "Anthropic", "vLLM", "ours"), name
        for mark, fields in zip(cells, served, strict=True):
            assert mark in (("✓", "–", "✗") if name in fields else ("", "✗")), (name, mark)
        assert any(cells), name


@pytest.mark.parametrize("named", sorted(NAMED))
def test_every_named_test_exists(named: tuple[str, str, str]) -> None:
    file, function, case = named
    source = (TESTS / file).read_text()
    assert f"def {function}(" in source
    assert not case or f'"{case}"' in source


def test_every_row_names_a_test() -> None:
    assert [
        name for name, cells in ROWS.items() if not re.match(r"`tests/[\w/]+/test_\w+\.py::test_\w+", cells[-2])
    ] == []
