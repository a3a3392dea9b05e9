"""A grammar is tried by a short walk through it, so that a bad one is refused before its answer begins."""

from __future__ import annotations

import json

import pytest

from tokenloom.core.grammar.server import GrammarServer
from tokenloom.frontend.supervisor.resolve import DEMO_FOLDER
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.grammar import OpenGrammar
from tokenloom.ipc.structured_outputs import GrammarKind
from tokenloom.tests.core.harness import make_spec
from tokenloom.tests.support.engine_specs import in_folder


def optional(count: int) -> str:
    """A schema of properties that may all be absent."""
    return json.dumps({"type": "object", "properties": {f"k{i}": {"enum": [1]} for i in range(count)}})


def branches(count: int) -> str:
    parts = [{"type": "object", "properties": {f"k{i}": {"enum": [1]}}, "required": [f"k{i}"]} for i in range(count)]
    return json.dumps({"anyOf": parts})


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json", optional(1500), ""),
        ("json", optional(3000), "Current row has"),
        ("json", branches(3000), ""),
        ("regex", "x((a{100}){100}){100}", "masks take|too many expressions"),
        ("regex", "[a-z]{3,9}", ""),
        ("lark", "start: a\na: b", "unknown name"),
    ],
)
def test_a_grammar_that_would_fail_in_its_answer_is_refused_before(
    kind: GrammarKind, text: str, words: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = in_folder(make_spec(), tmp_path_factory.mktemp("run"), tokenizer_folder=str(DEMO_FOLDER))
    result = GrammarServer(spec, cache_size=0).prove(OpenGrammar(grammar_id=1, kind=kind, text=text))
    if words:
        assert isinstance(result, ErrorInfo)
        assert any(each in result.message for each in words.split("|")), result.message
    else:
        assert not isinstance(result, ErrorInfo), result.message
