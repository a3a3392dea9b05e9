"""ArgumentTypes: decides by a tool's schema whether an argument's text is a string or JSON.

Formats of tool calls that write values without quotes need this decision. Values are not validated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import TypeAlias

import msgspec

from ....ipc.codec import JsonObject
from .literals import read_literal

Allowed: TypeAlias = Mapping[str, frozenset[object] | None]  # JSON type → allowed values; None: all of the type
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_ALL: Allowed = dict.fromkeys(("null", "boolean", "integer", "number", "string", "array", "object"))
_SYNONYMS = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "list": "array", "dict": "object"}
_NAMES = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


class ArgumentTypes:
    """The types of one tool's arguments, each found once and then cached. The schema may refer to itself."""

    def __init__(self, schema: JsonObject) -> None:
        self._root = schema
        self._by_key: dict[str, Allowed] = {}
        self._by_ref: dict[str, Allowed] = {}

    def written(self, key: str, text: str) -> str:
        """Return an argument's value as JSON text.

        If the text is JSON of an allowed type other than string, it is read as JSON even if strings are allowed too, as
        in vLLM: 42 is a number for ["integer", "string"], and a string for ["string", "null"]. JSON is also read as
        such if the schema allows no string. Python's True, False and None count as JSON, and its lists and objects do
        if the schema allows no string. Anything else is a string, and so is an argument that the schema lacks."""
        allowed, as_text = self._of_key(key), json.dumps(text, ensure_ascii=False)
        bare = _PYTHON.get(text.strip(), text.strip())
        try:
            value = msgspec.json.decode(bare)
        except (msgspec.DecodeError, RecursionError):
            if not allowed or "string" in allowed or allowed.keys().isdisjoint(("array", "object")):
                return as_text
            return read_literal(bare) or as_text
        if not allowed or ("string" in allowed and (isinstance(value, str) or not _is_allowed(value, allowed))):
            return as_text
        return bare

    def may_be_text(self, key: str) -> bool:
        """Return whether an argument may be a string. One that the schema lacks may."""
        allowed = self._of_key(key)
        return not allowed or "string" in allowed

    def _of_key(self, key: str) -> Allowed:
        if key not in self._by_key:
            try:
                self._by_key[key] = _union(self._of_property(self._root, key, set()))
            except RecursionError:
                self._by_key[key] = _ALL
        return self._by_key[key]

    def _of_property(self, schema: object, key: str, seen: set[str]) -> Iterable[Allowed]:
        """Yield the types and values that each part of an object's schema allows for the property `key`."""
        if not isinstance(schema, dict):
            return
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, dict) and key in properties:
            yield self._allowed(properties[key])
        elif isinstance(others, dict):
            yield self._allowed(others)
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in seen:
            seen.add(ref)
            yield from self._of_property(self._target(ref), key, seen)
        for name in ("allOf", "anyOf", "oneOf"):
            for each in _list(schema.get(name)):
                yield from self._of_property(each, key, seen)

    def _allowed(self, schema: object) -> Allowed:
        if not isinstance(schema, dict):
            return _ALL
        found = [self._allowed(each) for each in _list(schema.get("allOf"))]
        if isinstance(ref := schema.get("$ref"), str):
            found.append(self._referred(ref))
        if "const" in schema:
            found.append(_of_value(schema["const"]))
        for name, read in (("type", _of_type), ("enum", _of_value), ("anyOf", self._allowed), ("oneOf", self._allowed)):
            if choices := _list(schema.get(name)):
                found.append(_union(map(read, choices)))
        allowed = reduce(_intersection, found, _ALL)
        return {**allowed, "null": None} if schema.get("nullable") is True else allowed

    def _referred(self, ref: str) -> Allowed:
        """Return the types and values that the target of a $ref allows; {} while it is being read, which ends a
        cycle."""
        if ref not in self._by_ref:
            self._by_ref[ref] = {}
            self._by_ref[ref] = self._allowed(self._target(ref))
        return self._by_ref[ref]

    def _target(self, ref: str) -> object:
        """Return the schema at a path in the root schema, "#/$defs/name"; None if there is none."""
        found: object = self._root if ref.startswith("#") else None
        for name in ref.lstrip("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _of_type(name: object) -> Allowed:
    name = _SYNONYMS.get(str(name).lower(), str(name).lower())
    if name == "number":
        return {"number": None, "integer": None}
    return {name: None} if name in _ALL else _ALL


def _of_value(value: object) -> Allowed:
    """Return the values that one entry of an enumeration allows: the entry itself; for a string, a list or an object,
    all values of its type."""
    name = _type_of(value)
    return {name: frozenset((value,)) if name in ("null", "boolean", "integer", "number") else None}


def _union(many: Iterable[Allowed]) -> Allowed:
    united: dict[str, frozenset[object] | None] = {}
    for allowed in many:
        for name, values in allowed.items():
            known = united.get(name, frozenset())
            united[name] = None if known is None or values is None else known | values
    return united


def _intersection(one: Allowed, other: Allowed) -> Allowed:
    common: dict[str, frozenset[object] | None] = {}
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        common[name] = b if a is None else a if b is None else a & b
    return common


def _type_of(value: object) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _NAMES[type(value)]


def _is_allowed(value: object, allowed: Allowed) -> bool:
    name = _type_of(value)
    return name in allowed and ((values := allowed[name]) is None or value in values)
