"""Closing of a schema: its objects get no other keys than those that it names, in all its branches together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .schema import Schema
from .translation_budget import TranslationBudget

BRANCHES = ("allOf", "anyOf", "oneOf")
KEYS = ("properties", "patternProperties", "additionalProperties", "required")


class Names:
    """All keys that the schemas, their branches (allOf, anyOf, oneOf) or $ref targets name. has_any: one of these
    schemas has properties, patternProperties or required, even if empty; is_open: one allows other keys explicitly."""

    def __init__(self, resolve: Callable[[object], Schema], budget: TranslationBudget, *schemas: Schema) -> None:
        self.names: dict[str, None] = {}
        self.patterns: dict[str, None] = {}
        self.has_any = self.is_open = False
        self._resolve = resolve
        self._budget = budget
        self._seen: set[int] = set()
        for each in schemas:
            self._add(each)

    def _add(self, schema: object) -> None:
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        lists = (schema.get(each) for each in ("properties", "required", "patternProperties"))
        self._budget.spend(1 + sum(len(each) for each in lists if isinstance(each, dict | list)))
        self.has_any |= not schema.keys().isdisjoint(("properties", "patternProperties", "required"))
        self.is_open |= schema.get("additionalProperties", False) is not False
        self.is_open |= schema.get("unevaluatedProperties", False) is not False
        self.names |= dict.fromkeys(_texts(schema.get("properties"))) | dict.fromkeys(_texts(schema.get("required")))
        self.patterns |= dict.fromkeys(_texts(schema.get("patternProperties")))
        for name in BRANCHES:
            for part in schema.get(name, ()) if isinstance(schema.get(name), list) else ():
                self._add(part)
        if "$ref" in schema:
            self._add(self._resolve(schema))


def close(node: Schema, found: Names) -> None:
    """Allow no other keys than those in `found`, unless the schema allows some explicitly, names none, has a single
    part that is closed by itself, or asks for more keys (minProperties) than it names."""
    if "unevaluatedProperties" in node and "additionalProperties" not in node:
        rest = node.pop("unevaluatedProperties")
    elif "additionalProperties" in node or found.is_open or not found.has_any:
        return
    elif num_parts(node) == 1 and not node.keys() & set(KEYS):
        return  # its only part is closed by itself
    else:
        rest = False
        if isinstance(least := node.get("minProperties"), int) and least > len(found.names) and not found.patterns:
            return
    node["properties"] = {name: {} for name in found.names} | node.get("properties", {})
    if found.patterns:
        node["patternProperties"] = {pattern: {} for pattern in found.patterns} | node.get("patternProperties", {})
    node["additionalProperties"] = rest


def num_parts(node: Schema) -> int:
    """Return how many schemas `node` joins: one per branch of allOf, one each for anyOf, oneOf, $ref and for KEYS."""
    num_branches = len(node["allOf"]) if isinstance(node.get("allOf"), list) else 0
    others = ("anyOf" in node, "oneOf" in node, "$ref" in node, bool(node.keys() & set(KEYS)))
    return num_branches + sum(others)


def also(node: Schema, *parts: Schema) -> None:
    """Let `parts` hold beside the schema."""
    if parts:
        node["allOf"] = [*node.get("allOf", ()), *parts]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, dict | list):
        yield from (each for each in value if isinstance(each, str))
