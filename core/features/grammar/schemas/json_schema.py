"""Translates JSON schemas of users to schemas that the grammar library supports.

Three things change. Objects and tuples are closed unless the schema opens them, as in vLLM: the answer has no keys or
items that the schema does not name. Keywords that the library lacks are replaced by others so that each answer still
conforms; if that is impossible they stay, and the library refuses them by name. Annotations are dropped: formats that
JSON Schema does not define, and `uniqueItems` over more values than can be listed.
"""

from __future__ import annotations

import json
import re
from itertools import permutations

from .....ipc.errors import RequestError
from .....ipc.params.json_schema import at_pointer, with_subschemas
from .closing import BRANCHES, Names, also, close, num_parts
from .exact_numbers import BOUNDS, infinite_number
from .key_pattern import KeyPatterns
from .look_ahead import without_look_ahead
from .schema import Schema, json_key
from .translation_budget import TranslationBudget

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
_DATE = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"
NAME_PATTERNS = {  # of keys, for which the library has no formats
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
MAX_UNIQUE_VALUES = 5  # values of which all arrangements are listed: 326 arrays
MAX_CONTAINED = 64
MAX_INLINED = 2000  # schemas repeated because their references have other keywords next to them
OTHER_KEYWORDS = {  # keywords that would be ignored or switch off others, with what to use instead
    "disallow": "use not",
    "divisibleBy": "use multipleOf",
    "extends": "use allOf",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $ref",
    "x-guidance": "use disable_any_whitespace",  # options of the library: with its `lenient`, keywords are ignored
}
_TYPES = ("string", "number", "object", "array", "boolean", "null")


def adapted(schema: Schema) -> Schema:
    """Translate a user's schema for the library. All that the result accepts conforms to `schema`, annotations apart.
    RequestError if the result would be too large or take too long, or if a keyword or number cannot be served."""
    result = _Adapter(schema).adapt(schema, is_open=False)
    assert isinstance(result, dict)
    return result


class _Adapter:
    """Translator of one schema. Owns the root, into which references point, and the references being inlined."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._budget = TranslationBudget(root)
        self._key_patterns = KeyPatterns()
        self._num_inlined = 0
        self._inlining: list[str] = []

    def adapt(self, schema: object, *, is_open: bool) -> object:
        """Return the translation of a part of the root. is_open: leave it open, since a schema around it is closed."""
        if not isinstance(schema, dict):
            return schema
        self._budget.enter(schema)
        node = schema.copy()
        self._check(node)
        if node.get("nullable") is True and isinstance(node.get("type"), str):  # of OpenAPI
            node["type"] = [node["type"], "null"]
        self._adapt_text(node)
        self._adapt_array(node)
        self._adapt_names(node)
        self._adapt_conditions(node)
        joined = self._join_patterns(node)
        is_joined = is_open or num_parts(node) > 1
        inlined = self._inline(node) if is_joined and "$ref" in node else []
        branches = {name: node.pop(name) for name in BRANCHES if isinstance(node.get(name), list)}
        result: Schema = with_subschemas(node, lambda part: self.adapt(part, is_open=False))
        if joined:
            result["patternProperties"] |= {each: self.adapt(part, is_open=True) for each, part in joined.items()}
        for name, parts in branches.items():
            result[name] = [self.adapt(part, is_open=is_joined) for part in parts]
        also(result, *inlined)
        if not is_open:
            found = Names(self._resolve, self._budget, node | branches, *inlined)
            close(result, found)
            self._replace_used_up(result, list(found.names))
        return result

    def _check(self, node: Schema) -> None:
        """Raise RequestError for keywords that would be ignored, and for numbers that are infinite."""
        reasons = [f"{each} is not served: {OTHER_KEYWORDS[each]}" for each in node.keys() & OTHER_KEYWORDS.keys()]
        for keyword in node.keys() & {"const", "enum", *BOUNDS}:
            number = infinite_number(node[keyword])
            if number is not None:
                reasons += [f"{number} in {keyword} is no number of JSON: leave it out"]
        if reasons:
            raise RequestError(f"structured_outputs.json{self._budget.place}: {min(reasons)}")

    def _resolve(self, schema: object) -> Schema:
        """Return `schema` or, if it is a reference, the schema that it refers to; {} if that is not found."""
        for _ in range(16):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._at(schema["$ref"])
        return schema if isinstance(schema, dict) else {}

    def _at(self, reference: str) -> object:
        self._budget.spend(1 + len(reference) // 64)
        return at_pointer(self._root, reference)

    def _inline(self, node: Schema) -> list[Schema]:
        """Remove the reference of `node` and return its translated target, which is to be closed together with the
        other keywords of `node`; an empty list if the reference must stay."""
        reference = node["$ref"]
        target = self._at(reference) if isinstance(reference, str) else None
        self._num_inlined += 1
        if not isinstance(target, dict) or not target or reference in self._inlining or self._num_inlined > MAX_INLINED:
            return []
        del node["$ref"]
        self._inlining.append(reference)
        inlined = self.adapt(target, is_open=True)
        self._inlining.pop()
        assert isinstance(inlined, dict)
        return [inlined]

    def _adapt_text(self, node: Schema) -> None:
        if isinstance(node.get("format"), str) and node["format"] not in FORMATS:
            del node["format"]
        if isinstance(node.get("pattern"), str):
            node["pattern"], *more = without_look_ahead(node["pattern"])
            also(node, *({"pattern": each} for each in more))

    def _adapt_array(self, node: Schema) -> None:
        if node.get("uniqueItems") is True and node.get("type") == "array":
            values = _values(self._resolve(node.get("items")))
            if 0 < len(values) <= MAX_UNIQUE_VALUES and "prefixItems" not in node and "contains" not in node:
                low, high = node.get("minItems", 0), node.get("maxItems", len(values))
                sizes = range(low, min(high, len(values)) + 1)
                node.clear()
                node["enum"] = [list(each) for size in sizes for each in permutations(values, size)]
                self._budget.spend(len(node["enum"]), len(node["enum"]) * len(json.dumps(values)))
        node.pop("uniqueItems", None)
        prefix, items = node.get("prefixItems", []), node.get("items", {})
        if "contains" in node and "maxContains" not in node and not isinstance(items, list):
            count = node.pop("minContains", 1)
            wanted = node.pop("contains")
            if 0 < count <= MAX_CONTAINED:  # the first ones are such
                parts = [*prefix, *[items] * (count - len(prefix))]
                prefix = [{"allOf": [part, wanted]} for part in parts[:count]] + parts[count:]
                node["prefixItems"], node["minItems"] = prefix, max(node.get("minItems", 0), count)
                node.setdefault("items", items)
        rest = node.pop("unevaluatedItems", False)
        if prefix and "items" not in node and node.get("minItems", 0) <= len(prefix):
            node["items"] = rest

    def _adapt_names(self, node: Schema) -> None:
        """Replace keywords on keys (names, dependencies) by properties and patterns."""
        names = self._resolve(node.get("propertyNames"))
        limits = names.keys() & {"enum", "const", "pattern", "format", "minLength", "maxLength", *BRANCHES, "not"}
        values, counts = node.get("additionalProperties", True), node.keys() & {"minProperties", "maxProperties"}
        if "propertyNames" in node and not limits:
            del node["propertyNames"]
        elif limits <= {"enum", "const"} and limits and "patternProperties" not in node:
            del node["propertyNames"]
            own, keys = node.get("properties", {}), [each for each in _values(names) if isinstance(each, str)]
            node["properties"] = {key: own.get(key, values) for key in keys if key in own or not counts}
            node["additionalProperties"] = False
            if counts:  # the library does so for patterns, not for properties that may be absent
                node["patternProperties"] = {f"^(?:{'|'.join(map(re.escape, keys))})$": values}
        elif "propertyNames" in node and "patternProperties" not in node and not node.get("properties"):
            low, high = names.get("minLength", 0), names.get("maxLength", "")
            pattern = names.get("pattern", NAME_PATTERNS.get(names.get("format", ""), ""))
            if not limits - {"minLength", "maxLength"}:
                pattern = rf"^[\s\S]{{{low},{high}}}$"
            if pattern and len(limits & {"pattern", "format", "minLength"}) <= 1:
                del node["propertyNames"]
                node["patternProperties"], node["additionalProperties"] = {pattern: values}, False
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for key, needed in dict(node.pop(keyword, {})).items():
                then = {"required": needed} if isinstance(needed, list) else needed
                also(node, {"anyOf": [{"properties": {key: False}}, then]})

    def _join_patterns(self, node: Schema) -> Schema:
        """Join each property's schema with those of the patterns that match its name (allOf), so that additional keys
        are forbidden for them together, not for each alone. Return these patterns with their schemas."""
        own, patterns = node.get("properties"), node.get("patternProperties")
        joined: Schema = {}
        if isinstance(own, dict) and isinstance(patterns, dict):
            properties: Schema = {}
            for name, part in own.items():
                found = [each for each in patterns if self._matches(each, name)]
                joined |= {each: patterns[each] for each in found}
                properties[name] = {"allOf": [part, *(patterns[each] for each in found)]} if found else part
            node["properties"] = properties
        return joined

    def _matches(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches a key. False for an invalid pattern, which the library refuses."""
        self._budget.spend(1)
        return self._key_patterns.matches(pattern, name) is True

    def _replace_used_up(self, part: object, names: list[str]) -> None:
        """Replace patterns that match no other keys than `names` by properties: the library would start another key
        that matches and could not complete it. names: those of all schemas that are joined with `part`."""
        if not isinstance(part, dict):
            return
        patterns, properties = part.get("patternProperties", {}), part.get("properties", {})
        for pattern in list(patterns) if isinstance(patterns, dict) and isinstance(properties, dict) else ():
            matched = [name for name in names if self._matches(pattern, name)]
            if matched and not self._key_patterns.matches_others(pattern, matched):
                values = patterns.pop(pattern)
                new = {name: values for name in matched if properties.get(name, {}) == {}}  # others are joined already
                properties = part["properties"] = properties | new
        for name in BRANCHES:
            for branch in part[name] if isinstance(part.get(name), list) else ():
                self._replace_used_up(branch, names)

    def _adapt_conditions(self, node: Schema) -> None:
        if "if" in node:
            condition, then, otherwise = node.pop("if"), node.pop("then", {}), node.pop("else", {})
            opposite = self._opposite(condition, node)
            # a value that conforms to both parts conforms under any condition
            second = [then, otherwise] if opposite is None else [opposite, otherwise]
            if then != {} or otherwise != {}:
                also(node, {"anyOf": [{"allOf": [condition, then]}, {"allOf": second}]})
        refused = self._resolve(node.get("not"))
        if not refused:
            return
        if refused.keys() == {"type"} and refused["type"] != "integer":
            own, names = node.get("type", list(_TYPES)), refused["type"]
            without = set(names if isinstance(names, list) else [names])
            without |= {"integer"} if "number" in without else set()
            node["type"] = [each for each in ([own] if isinstance(own, str) else own) if each not in without]
        elif refused.keys() <= {"enum", "const"} and (own := _values(node)):
            node["enum"] = _difference(own, _values(refused))
            node.pop("const", None)
        elif (opposite := self._opposite(refused, node)) is not None:
            also(node, opposite)
        else:
            return  # the library refuses it by name
        del node["not"]

    def _opposite(self, condition: object, node: Schema) -> Schema | None:
        """Return a schema of exactly the objects of `node` that do not conform to `condition`; None if that is no
        condition on one property that can be inverted here."""
        if not isinstance(condition, dict) or not condition.keys() <= {"properties", "required", "type", "title"}:
            return None
        properties, required = condition.get("properties", {}), condition.get("required", [])
        if len(properties | dict.fromkeys(required)) != 1 or condition.get("type", "object") != "object":
            return None
        if node.get("type") != "object":
            return None
        ((key, wanted),) = (properties or {key: {} for key in required}).items()
        if wanted in ({}, True):
            return {"properties": {key: False}}
        domain, values = _values(self._resolve(node.get("properties", {}).get(key))), _values(self._resolve(wanted))
        if not domain or not values or wanted.keys() - {"enum", "const", "title", "type"}:
            return None
        others = {"properties": {key: {"enum": rest} if (rest := _difference(domain, values)) else False}}
        return others if required else others | {"required": [key]}


def _values(schema: Schema) -> list[object]:
    """Return all values of a schema, if it lists them; else none."""
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    return [False, True] if schema.get("type") == "boolean" else []


def _difference(values: list[object], without: list[object]) -> list[object]:
    """Return the values that are not in `without`."""
    keys = set(map(json_key, without))
    return [each for each in values if json_key(each) not in keys]
