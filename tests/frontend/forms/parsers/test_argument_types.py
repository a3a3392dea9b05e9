"""An argument that a model writes without quotes is a text or JSON as the tool's whole schema says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.forms.parsers.argument_types import ArgumentTypes
from tokenloom.tests.frontend.forms.parsers.cuts import call_parser, parse

TEXT = {"type": "string"}
TEXTS = {  # schemas that allow texts and null at most
    "type": TEXT,
    "list of types": {"type": ["string", "null"]},
    "anyOf": {"anyOf": [TEXT, {"type": "null"}]},
    "oneOf": {"oneOf": [{"type": "null"}, TEXT]},
    "nested": {"anyOf": [{"oneOf": [{"allOf": [TEXT]}]}, {"type": "null"}]},
    "allOf": {"allOf": [TEXT, {"minLength": 1}]},
    "enum": {"enum": ["1", "2"]},
    "const": {"const": "42"},
    "reference": {"$ref": "#/$defs/text"},
    "reference to a reference": {"$ref": "#/$defs/again", "description": "a text"},
    "older reference": {"$ref": "#/definitions/a~1text"},
    "circle": {"$ref": "#/$defs/circle"},
    "nullable": {"type": "string", "nullable": True},
    "Python's name": {"type": "str"},
    "capitals": {"type": "STRING"},
}
ROOT = {
    "$defs": {
        "text": TEXT,
        "again": {"$ref": "#/$defs/text"},
        "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, TEXT]},
        "nothing": {"$ref": "#/$defs/nothing"},
        "row": {"properties": {"zip": TEXT}},
    },
    "definitions": {"a/text": TEXT},
}


def value(schema: object, text: str) -> object:
    return json.loads(ArgumentTypes(ROOT | {"properties": {"x": schema}}).written("x", text))


@pytest.mark.parametrize(
    "text", ["42", "1", "3.5", "03106", "1e999", "NaN", "true", "False", '{"k": 1}', "[1]", '"q"', " x "]
)
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_stays_a_text_whatever_it_looks_like(name: str, text: str) -> None:
    assert value(TEXTS[name], text) == text


@pytest.mark.parametrize("text", ["null", "None"])
def test_null_is_null_where_the_schema_has_it(text: str) -> None:
    for name in ("list of types", "anyOf", "oneOf", "nested", "nullable"):
        assert value(TEXTS[name], text) is None
    for name in ("type", "enum", "reference"):
        assert value(TEXTS[name], text) == text


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "integer"}, "42", 42),
        ({"type": "int"}, " 42\n", 42),
        ({"type": "integer"}, "03106", "03106"),
        ({"type": "integer"}, "3.5", 3.5),
        ({"type": "integer"}, "many", "many"),
        ({"type": "number"}, "7", 7),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "-Infinity", "-Infinity"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, '["a", [1]]', ["a", [1]]),
        ({"type": "array"}, '["a", [1]', '["a", [1]'),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": "object"}, "{'a': 1}", {"a": 1}),
        ({"type": ["integer", "string"]}, "42", 42),
        ({"type": ["integer", "string"]}, "42.5", "42.5"),
        ({"type": ["integer", "string"]}, "042", "042"),
        ({"anyOf": [TEXT, {"type": "object"}]}, '{"k": 1}', {"k": 1}),
        ({"anyOf": [TEXT, {"type": "object"}]}, "[1]", "[1]"),
        ({"anyOf": [TEXT, {"type": "boolean"}]}, "True", True),
        ({"enum": ["1", 2, None]}, "1", "1"),
        ({"enum": ["1", 2, None]}, "2", 2),
        ({"enum": ["1", 2, None]}, "None", None),
        ({"enum": [1, 2]}, "3", 3),
        ({"const": True}, "True", True),
        ({"allOf": [{"type": ["integer", "string"]}, TEXT]}, "42", "42"),
        ({"allOf": [{"$ref": "#/$defs/text"}], "default": "x"}, "42", "42"),
        ({}, "42", 42),
        ({"description": "anything"}, "so", "so"),
        (True, "[1]", [1]),
        ({"$ref": "#/$defs/nothing"}, "42", "42"),
        ({"$ref": "#/$defs/absent"}, "42", 42),
        ({"$ref": "https://example.org/text"}, "42", 42),
    ],
)
def test_a_value_gets_the_type_that_the_schema_names(schema: object, text: str, expected: object) -> None:
    found = value(schema, text)
    assert (type(found), found) == (type(expected), expected)


@given(st.integers() | st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20))
def test_a_number_keeps_its_digits(number: object) -> None:
    types = ArgumentTypes({"properties": {"x": {"type": "number"}}})
    assert types.written("x", f"{number}") == f"{number}"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/row"},
        {"allOf": [{"$ref": "#/$defs/row"}]},
        {"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"$ref": "#/$defs/row"}]},
        {"properties": {"a": {}}, "additionalProperties": TEXT},
        {"properties": {"a": {}}},
        {"$ref": "#"},
    ],
)
def test_a_property_is_found_wherever_the_schema_has_it(schema: dict[str, object]) -> None:
    assert ArgumentTypes(ROOT | schema).written("zip", "01234") == '"01234"'
    assert ArgumentTypes(ROOT | schema).written("zip", "42") == '"42"'


def test_a_schema_that_doubles_at_each_level_is_read_once() -> None:
    levels = {f"l{i}": {"anyOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(200)}
    root = {"$defs": levels | {"l200": TEXT}, "properties": {"x": {"$ref": "#/$defs/l0"}}}
    assert ArgumentTypes(root).written("x", "42") == '"42"'


def test_a_schema_deeper_than_the_stack_takes_json_as_json() -> None:
    schema: dict[str, object] = TEXT
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert ArgumentTypes({"properties": {"x": schema}}).written("x", "42") == "42"


@pytest.mark.parametrize(
    ("kind", "text", "written"),
    [
        ("object", "{'a': [1, True, None], 'b': \"it's\"}", '{"a": [1, true, null], "b": "it\'s"}'),
        ("array", "('x', 2.5)", '["x", 2.5]'),
        ("array", "['x', 2.5]", '["x", 2.5]'),
        ("string", "{'a': 1}", "\"{'a': 1}\""),
        (["string", "object"], "{'a': 1}", "\"{'a': 1}\""),
        ("integer", "{'a': 1}", "\"{'a': 1}\""),
        ("object", "{'a': f(1)}", "\"{'a': f(1)}\""),
    ],
)
def test_lists_and_objects_as_python_prints_them_are_json_where_no_string_is_allowed(
    kind: object, text: str, written: str
) -> None:
    assert ArgumentTypes({"properties": {"x": {"type": kind}}}).written("x", text) == written


def test_arguments_of_a_call_are_read_by_the_schema_of_its_tool() -> None:
    schemas = {"f": ROOT | {"properties": TEXTS | {"n": {"type": "integer"}}}}
    keys = [*TEXTS, "n", "unknown"]
    text = "".join(f"<parameter={key}>\n12\n</parameter>" for key in keys)
    _, content, calls = parse(
        call_parser("qwen3_coder", schemas), list(f"<function=f>{text}</function><function=g>{text}</function>")
    )
    assert content == ""
    assert calls == [("f", dict.fromkeys(keys, "12") | {"n": 12}), ("g", dict.fromkeys(keys, "12"))]


@pytest.mark.parametrize(
    ("kind", "text", "written"),
    [
        ("object", "{'a': [1, True, None], 'b': 'it\\'s \"x\"'}", '{"a": [1, true, null], "b": "it\'s \\"x\\""}'),
        ("array", "['x', 2.5]", '["x", 2.5]'),
        ("array", "['x'", "\"['x'\""),
        ("string", "['x', 2.5]", "\"['x', 2.5]\""),
        (["string", "array"], "['x', 2.5]", "\"['x', 2.5]\""),
    ],
)
def test_lists_and_objects_in_pythons_form_are_json_unless_they_may_be_texts(
    kind: object, text: str, written: str
) -> None:
    types = ArgumentTypes({"properties": {"key": {"type": kind}}})
    assert types.written("key", text) == written
