"""Traversal of JSON schemas: the keywords that contain subschemas, and functions to list or rewrite these.

Knows nothing of the meaning of keywords. Never descends into data (`const`, `enum`, `default`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote

from ..codec import JsonObject
from ..digits import whole_number
from ..errors import RequestError

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of schemas by name
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ONES = (
    *("items", "additionalProperties", "unevaluatedProperties", "propertyNames", "contains"),
    *("additionalItems", "unevaluatedItems", "not", "if", "then", "else"),
)


def subschemas(schema: object) -> Iterator[tuple[str, object]]:
    """Yield (JSON pointer step, subschema) for each direct subschema."""
    if not isinstance(schema, dict):
        return
    for name in MAPS:
        if isinstance(schema.get(name), dict):
            yield from ((f"/{name}/{escaped(key)}", part) for key, part in schema[name].items())
    for name in LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"/{name}/{i}", part) for i, part in enumerate(schema[name]))
    for name in ONES:
        if isinstance(schema.get(name), dict):
            yield f"/{name}", schema[name]


def with_subschemas(schema: JsonObject, change: Callable[[object], object]) -> JsonObject:
    """Return a copy with `change` applied to each direct subschema."""
    copy = schema.copy()
    for name, value in schema.items():
        if isinstance(value, dict) and name in MAPS:
            copy[name] = {key: change(part) for key, part in value.items()}
        elif isinstance(value, list) and name in LISTS:
            copy[name] = [change(part) for part in value]
        elif isinstance(value, dict) and name in ONES:
            copy[name] = change(value)
    return copy


def moved(schema: JsonObject, to: str) -> JsonObject:
    """Return a copy to embed in a larger schema at the JSON pointer `to`: internal $ref rewritten, no $id or $schema.

    RequestError, about structured_outputs.json, if the schema is nested too deep."""
    try:
        whole = _moved(schema, to)
    except RecursionError:
        raise RequestError("structured_outputs.json is nested too deep to be compiled: use fewer levels") from None
    assert isinstance(whole, dict)
    return {key: value for key, value in whole.items() if key not in ("$id", "$schema")}


def _moved(part: object, to: str) -> object:
    if not isinstance(part, dict):
        return part
    copy = with_subschemas(part, partial(_moved, to=to))
    reference = copy.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        copy["$ref"] = to + reference[1:]
    return copy


def escaped(key: str) -> str:
    """Escape a key for a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def at_pointer(root: object, reference: str) -> object:
    """Return the part of `root` that a reference (`#/...`) points to; {} if there is no such part."""
    part: Any = root if reference.startswith("#") else {}
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        index = whole_number(key)
        if isinstance(part, list) and index is not None and index < len(part):
            part = part[index]
        elif isinstance(part, dict) and key in part:
            part = part[key]
        else:
            return {}
    return part
