"""Parts of JSON schemas that their translators share: groups of keywords, types, listed values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .....ipc.params.json_schema import with_subschemas
from .exact_numbers import BOUNDS

Schema = dict[str, Any]

OBJECT = ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
ARRAY = ("prefixItems", "items", "additionalItems", "minItems", "maxItems")
KEYWORDS_BY_TYPE = {"object": OBJECT, "array": ARRAY, "integer": BOUNDS, "number": BOUNDS}
DEFINITIONS = ("$defs", "definitions")
UNIONS, VALUES = ("anyOf", "oneOf"), ("const", "enum")
KEYWORDS = {"type", "$ref", "allOf", *UNIONS, *VALUES, *OBJECT, *ARRAY, *BOUNDS, "multipleOf"}
KEYWORDS |= {"minLength", "maxLength", "pattern", "format"}
ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
}
ANNOTATIONS |= {"$schema", "$id", *DEFINITIONS}
OWN = KEYWORDS - {"$ref", "allOf", *UNIONS}
_CLASSES = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
TYPES = ["null", "boolean", "number", "string", "array", "object"]


def changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return a copy of a schema with `change` applied to it and to all schemas in it, outer ones first."""
    if not isinstance(schema, dict):
        return schema
    return with_subschemas(change(schema), lambda part: changed(part, change))


def json_key(value: object) -> str:
    """Return a text that is the same for values that are equal in JSON Schema: 1 equals 1.0, and true is not 1."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: object) -> object:
    """Return the value with each float that is whole as an integer."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    if isinstance(value, dict):
        return {name: _with_integers(each) for name, each in value.items()}
    return value


def listed_values(schema: Schema) -> list[object]:
    """Return the values that `const` and `enum` allow (both, if both are given) and that match the schema's `type`."""
    values = schema.get("enum", [schema.get("const")])
    if "const" in schema:
        constant = json_key(schema["const"])
        values = [each for each in values if json_key(each) == constant]
    types = listed(schema.get("type", TYPES))
    return [value for value in values if any(has_type(value, each) for each in types)]


def common_types(one: str | list[str], other: str | list[str]) -> list[str]:
    """Return the types that two values of `type` have in common; each integer is a number."""
    pairs = [(each, name) for each in listed(one) for name in listed(other)]
    integers = ["integer"] if any({*pair} == {"integer", "number"} for pair in pairs) else []
    same = [each for each, name in pairs if each == name]
    return same if {"integer", "number"} & {*same} else same + integers


def listed(types: str | list[str]) -> list[str]:
    """Return the value of `type` as a list."""
    return [types] if isinstance(types, str) else types


def has_type(value: object, name: str) -> bool:
    """Return whether a value has the type `name`."""
    if isinstance(value, bool) or name not in ("integer", "number"):
        return isinstance(value, _CLASSES.get(name, ()))
    return isinstance(value, int | float) and (name == "number" or value == int(value))
