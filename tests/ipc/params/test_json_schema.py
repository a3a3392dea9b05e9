"""Embedding a schema in a larger one keeps its meaning."""

from __future__ import annotations

import pytest

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.params.json_schema import moved, subschemas

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a~1b"}, "all": {"$ref": "#"}}}


def test_moving_a_schema_rewrites_its_references_but_not_data() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {"a/b": NODE},
        "properties": {"$ref": {"const": {"$ref": "#"}}, "far": {"$ref": "https://x.example/#"}},
        "anyOf": [{"$ref": "#/properties/far"}],
        "items": {"enum": [{"$ref": "#"}]},
    }
    assert moved(schema, "#/$defs/f0") == {
        "$defs": {
            "a/b": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/f0/$defs/a~1b"}, "all": {"$ref": "#/$defs/f0"}},
            }
        },
        "properties": {"$ref": {"const": {"$ref": "#"}}, "far": {"$ref": "https://x.example/#"}},
        "anyOf": [{"$ref": "#/$defs/f0/properties/far"}],
        "items": {"enum": [{"$ref": "#"}]},
    }
    assert schema["anyOf"] == [{"$ref": "#/properties/far"}], "the caller's own is left as it is"


def test_subschemas_are_listed_with_their_pointers() -> None:
    schema = {"properties": {"a/b": {}, "c": True}, "items": [{}], "not": {"const": {"items": {}}}}
    assert [pointer for pointer, _ in subschemas(schema)] == ["/properties/a~1b", "/properties/c", "/items/0", "/not"]


def test_a_schema_that_is_nested_too_deep_is_refused_by_name() -> None:
    schema: dict[str, object] = {}
    for _ in range(2000):
        schema = {"not": schema}
    with pytest.raises(RequestError, match=r"structured_outputs\.json is nested too deep"):
        moved(schema, "#/$defs/f0")
