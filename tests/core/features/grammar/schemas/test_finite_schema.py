"""Numbers of an answer in JSON are within float64, wherever the schema leaves them open."""

from __future__ import annotations

import json

import pytest

from tokenloom.core.features.grammar.schemas.finite_schema import FiniteSchema
from tokenloom.core.features.grammar.schemas.json_schema import adapted
from tokenloom.ipc.params.structured_outputs import GrammarKind
from tokenloom.tests.core.features.grammar.matching import COMPILER, TOKENIZER, Schema, record

FREE: dict[str, tuple[Schema, str]] = {  # schemas, and a text of each with N in place of a number
    "anything": ({}, '{"a":[N]}'),
    "object": ({"type": "object"}, '{"a":{"b":N}}'),
    "list": ({"type": "array"}, "[true,N]"),
    "number": ({"type": "number"}, "N"),
    "property": (record(a={"type": ["number", "null"]}), '{"a":N}'),
    "open value": (record(a={}), '{"a":[N]}'),
    "union": ({"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "number"}}]}, "[1,N]"),
    "tree": ({"$ref": "#/$defs/a", "$defs": {"a": record(b={"type": "array", "items": {}})}}, '{"b":[N]}'),
    "beside patterns": ({"type": "object", "patternProperties": {"^a": {"type": "number"}}}, '{"ab":N}'),
}
BOUND: list[Schema] = [
    record(a={"type": "integer"}),
    record(a={"type": "number", "minimum": 0, "maximum": 9}, b={"type": "string"}),
    {"type": "array", "items": {"enum": [1.5, "x"]}},
]


@pytest.mark.parametrize("kind", ["json", "compact_json"])
@pytest.mark.parametrize("name", FREE)
def test_open_numbers_are_finite(name: str, kind: GrammarKind) -> None:
    schema, text = FREE[name]

    def takes(number: str) -> bool:
        matcher = COMPILER.compile(kind, json.dumps(schema))
        letters = text.replace("N", number)
        ids = [each for letter in letters for each in TOKENIZER.encode(letter, add_special_tokens=False).ids]
        return matcher.inner.try_consume_tokens(ids) == len(ids) and matcher.inner.is_accepting()

    assert all(map(takes, ("0", "-1.5", "123456789", "-2.5e-17", "1e99")))
    assert not any(map(takes, ("1e400", "1E+309", "-2e999")))


@pytest.mark.parametrize("schema", BOUND)
def test_schemas_without_open_numbers_stay_as_they_are(schema: Schema) -> None:
    assert not FiniteSchema(adapted(schema), {}).is_needed
