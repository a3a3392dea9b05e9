"""LarkSchema: translates a schema whose numbers the grammar library would round to a Lark grammar of the same texts.

The library reads a schema's numbers as float64, but a Lark grammar may contain both regular expressions and schemas. So
the path from the root to each such number (objects, arrays, unions, references) becomes rules, the number becomes an
expression over its digits, and everything else stays a schema. If the path contains other keywords (patternProperties,
minProperties, multipleOf), the schema stays, too: bounds are moved inwards, and a `const` or `enum` is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Literal

from ....ipc.errors import RequestError
from ....ipc.params.json_schema import at_pointer, subschemas, with_subschemas
from .exact_numbers import (
    BOUNDS,
    LOWER,
    decimal_bounds,
    digits_expression,
    inexact_number,
    integer_bounds,
    is_number,
    narrowed,
)
from .translation_budget import TranslationBudget

Schema = dict[str, Any]

MAX_TAIL = 16  # items of a tuple that may be absent
MAX_ALTERNATIVES = 64  # alternatives of a schema with several unions
MAX_OPEN = 50  # nested targets of references that are written at once
MAX_LEVELS = 8  # levels of references to references
_OBJECT = ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
_ARRAY = ("prefixItems", "items", "additionalItems", "minItems", "maxItems")
_KEYWORDS_BY_TYPE = {"object": _OBJECT, "array": _ARRAY, "integer": BOUNDS, "number": BOUNDS}
_DEFINITIONS = ("$defs", "definitions")
_UNIONS, _VALUES = ("anyOf", "oneOf"), ("const", "enum")
_KEYWORDS = {"type", "$ref", "allOf", *_UNIONS, *_VALUES, *_OBJECT, *_ARRAY, *BOUNDS, "multipleOf"}
_KEYWORDS |= {"minLength", "maxLength", "pattern", "format"}
_OWN = _KEYWORDS - {"$ref", "allOf", *_UNIONS}
_CLASSES = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
# a JSON string, with the escapes that the library writes: those of control characters
_TEXT = r'/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00([01][0-9a-fA-F]|7[fF]))*"/'


class LarkSchema:
    """Translator of one schema, which it does not change; owns the rules written so far. `is_needed`: the schema has
    numbers that the library would round."""

    def __init__(self, root: Schema, options: Mapping[str, object]) -> None:
        self._root, self._options = root, options
        self._budget = TranslationBudget(root)
        self._has_other_references = False  # others than pointers into the root
        self._on_the_way = self._find_ways()  # ids of the schemas on the paths to such numbers
        self._rules: dict[str, str] = {}  # rule names by definition
        self._name_by_target: dict[int, str] = {}
        self._made: list[Schema] = []  # schemas that the root does not hold: another must not get their ids
        self._targets: list[str] = []  # definitions of references
        self._waiting: list[object] = []  # targets without a rule
        self._num_open = 0  # targets that lead to the one that is being written

    @property
    def is_needed(self) -> bool:
        return bool(self._on_the_way)

    def _find_ways(self) -> set[int]:
        """Return the ids of all schemas that have, or contain at any depth, a number that would be rounded. If there
        are any, schemas that contain a reference are added, since its target would be repeated wherever it is named;
        and those that contain `false`, which the library refuses in a schema of its own."""
        outer_by_id: dict[int, list[int]] = {}
        todo, found, others = [self._root], list[int](), list[int]()
        while todo:
            schema = todo.pop()
            inner = [part for step, part in subschemas(schema) if step.split("/")[1] not in _DEFINITIONS]
            if "$ref" in schema:
                inner.append(at_pointer(self._root, str(schema["$ref"])))
                self._has_other_references |= not f"{schema['$ref']}/".startswith("#/")
            self._has_other_references |= "$id" in schema and schema is not self._root
            if _is_inexact(schema):
                found.append(id(schema))
            if "$ref" in schema or any(part is False for part in inner):
                others.append(id(schema))
            for part in inner:
                if isinstance(part, dict):
                    if id(part) not in outer_by_id:
                        todo.append(part)
                    outer_by_id.setdefault(id(part), []).append(id(schema))
        ways: set[int] = set()
        if found:
            found += others
        while found:
            if (each := found.pop()) not in ways:
                ways.add(each)
                found += outer_by_id.get(each, ())
        return ways

    def outline(self) -> Schema:
        """Return the schema without the numbers that would be rounded, so that the library can check the rest."""
        return dict(_changed(self._root, _without_inexact))

    def narrowed(self) -> Schema:
        """Return the schema with bounds moved inwards. RequestError for a `const` or `enum` that would be rounded."""
        self._budget = TranslationBudget(self._root)
        return dict(_changed(self._root, self._narrowed))

    def text(self) -> str | None:
        """Return the grammar in Lark; None if a number cannot be kept exact, or the grammar would be too large."""
        if self._has_other_references:
            return None
        self._budget = TranslationBudget(self._root)  # of time, too: a slow compiler of the outline has not used it
        try:
            start = self._value(self._root)
            while self._waiting:
                start = start if self._write_target() else None
        except (RequestError, RecursionError):
            return None
        if start is None:
            return None
        head = []
        if "whitespace_pattern" in self._options:
            head = ['%llguidance {"ignore_once": true}', f"%ignore /{self._options['whitespace_pattern']}/"]
        rules = [f"{name}: {definition}" for definition, name in self._rules.items()]
        return "\n".join([*head, f"start: {start}", *self._targets, *rules])

    def _rule(self, definition: str, kind: str = "r") -> str:
        """Return the name of the rule with this definition, or of the terminal if `kind` is in capitals; add it if it
        is new."""
        if definition not in self._rules:
            self._budget.spend(1, len(definition))
            self._rules[definition] = f"{kind}{len(self._rules)}"
        return self._rules[definition]

    def _value(self, schema: object) -> str | None:
        """Return a rule for the values of a schema; None if there are none."""
        if schema is False:
            return None
        if not isinstance(schema, dict) or id(schema) not in self._on_the_way:
            return self._schema(schema if isinstance(schema, dict) else {})
        self._budget.enter(schema)
        keywords = schema.keys() & _KEYWORDS
        if keywords == {"$ref"}:
            return self._target(at_pointer(self._root, schema["$ref"]))
        if keywords == {"allOf"} and len(schema["allOf"]) == 1:
            return self._value(schema["allOf"][0])
        if keywords in ({"anyOf"}, {"oneOf"}):
            return self._any(self._value(part) for part in schema[keywords.pop()])
        if keywords & {"$ref", "allOf", *_UNIONS}:
            alternatives = self._alternatives(schema)
            joined = None if alternatives is None else [self._joined(parts) for parts in alternatives]
            if joined is None or None in joined:
                return self._schema(schema)
            return self._any(self._own_value(each) for each in joined if isinstance(each, dict))
        return self._own_value(schema)

    def _own_value(self, schema: Schema) -> str | None:
        """Return a rule for a schema without $ref, allOf, anyOf or oneOf; None if it has no values."""
        if schema.keys().isdisjoint(_VALUES):
            return self._typed(schema)
        if schema.keys() & _KEYWORDS <= {*_VALUES, "type"}:
            return self._constants(_values(schema))
        return self._schema(schema)

    def _alternatives(self, schema: object, level: int = 0) -> list[list[Schema]] | None:
        """Return the alternatives of a schema with unions, in the library's order. Each is a list of schemas without
        $ref, allOf or unions that must all hold. None if there are too many, or if the schema refers to itself."""
        if not isinstance(schema, dict):
            return [] if schema is False else [[]]
        self._budget.spend(1)
        own = {name: value for name, value in schema.items() if name in _OWN}
        own_at = "properties" if "properties" in own else next(iter(own), None)  # its place decides the order
        found: list[list[Schema]] = [[]]
        for keyword, value in schema.items():
            if keyword == own_at:
                choices: list[list[list[Schema]] | None] = [[[own]]]
            elif keyword == "$ref":
                target = at_pointer(self._root, value)
                choices = [self._alternatives(target, level + 1) if level < MAX_LEVELS else None]
            elif keyword == "allOf":
                choices = [self._alternatives(part, level) for part in value]
            elif keyword in _UNIONS:
                branches = [self._alternatives(part, level) for part in value]
                choices = [None if None in branches else list(chain(*filter(None, branches)))]
            else:
                continue
            for choice in choices:
                if choice is None or len(found) * len(choice) > MAX_ALTERNATIVES:
                    return None
                found = [[*left, *right] for left in found for right in choice]
        return found

    def _joined(self, parts: list[Schema]) -> Schema | Literal[False] | None:
        """Return one schema for schemas that must all hold; False if no value conforms, None if the keywords known here
        cannot express it."""
        result: Schema = {}
        objects = [part for part in parts if not part.keys().isdisjoint(_OBJECT)]
        for part in parts:
            for name, value in part.items():
                if name == "type" and name in result:
                    value = _common_types(result[name], value)
                elif name in BOUNDS and isinstance(value, bool) and len(parts) > 1:  # of draft 4
                    return None
                elif name in BOUNDS and name in result:
                    value = (max if name in LOWER else min)(result[name], value)
                elif name in result and result[name] != value and name not in _OBJECT:
                    return None
                result[name] = value
        if result.get("type") == []:
            return False
        if sum(not part.keys().isdisjoint(_ARRAY) for part in parts) > 1 or (
            not result.keys().isdisjoint(_VALUES) and result.keys() - {*_VALUES, "type"}
        ):
            return None
        if len(objects) < 2:
            return result
        together = self._together(objects)
        return None if together is None else result | together

    def _together(self, objects: list[Schema]) -> Schema | None:
        """Return the keywords of objects that conform to all of `objects`; None if those known here cannot express
        it."""
        if any(part.keys() & {"patternProperties", "minProperties", "maxProperties"} for part in objects):
            return None
        others = [part.get("additionalProperties", True) for part in objects]
        own = [part.get("properties", {}) for part in objects]
        required = list(dict.fromkeys(name for part in objects for name in part.get("required", ())))
        names = dict.fromkeys([*chain(*own), *required])
        schemas = {name: [part.get(name, other) for part, other in zip(own, others, strict=True)] for name in names}
        self._budget.spend(len(schemas) * len(objects))
        properties = {name: self._both(each) for name, each in schemas.items()}
        return {"properties": properties, "required": required, "additionalProperties": self._both(others)}

    def _both(self, schemas: list[object]) -> object:
        """Return a schema for values that conform to all of `schemas`."""
        if False in schemas:
            return False
        limits = [each for each in schemas if each not in (True, {})]
        if len(limits) < 2:
            return limits[0] if limits else True
        both = {"allOf": limits}
        self._made.append(both)
        self._on_the_way.add(id(both))
        return both

    def _any(self, options: Iterable[str | None]) -> str | None:
        found = list(dict.fromkeys(each for each in options if each is not None))
        return self._rule(" | ".join(found)) if len(found) > 1 else found[0] if found else None

    def _schema(self, schema: Schema) -> str:
        """Return a rule that contains the schema itself, with bounds moved inwards. RequestError if a `const` or `enum`
        has a number that would be rounded."""
        name_by_reference: dict[str, str] = {}
        todo = list[str]()

        def change(part: Schema) -> Schema:
            result = {key: value for key, value in self._narrowed(part).items() if key not in _DEFINITIONS}
            if (reference := result.get("$ref")) is not None:
                if reference not in name_by_reference:
                    name_by_reference[reference] = str(len(name_by_reference))
                    todo.append(reference)
                result["$ref"] = "#/$defs/" + name_by_reference[reference]
            return result

        document = _changed(schema, change)
        definitions: Schema = {}
        while todo:
            reference = todo.pop()
            definitions[name_by_reference[reference]] = _changed(at_pointer(self._root, reference), change)
        document |= {"$defs": definitions, "x-guidance": self._options}
        document |= {"$schema": self._root["$schema"]} if "$schema" in self._root else {}
        return self._rule("%json " + json.dumps(document, ensure_ascii=False))

    def _narrowed(self, schema: Schema) -> Schema:
        self._budget.enter(schema)
        number = next((each for name in _VALUES if (each := inexact_number(schema.get(name))) is not None), None)
        if number is not None:
            raise RequestError(
                f"structured_outputs.json{self._budget.place}: {str(number)[:40]} cannot be kept exact beside or below "
                "patternProperties, minProperties, maxProperties or multipleOf, nor in a schema of many alternatives: "
                'write it without these, or make it a text, {"type": "string"}'
            )
        return narrowed(schema)

    def _target(self, schema: object) -> str | None:
        """Return the name of the rule for a reference's target, which may refer to itself; None if it has no values.
        If MAX_OPEN targets are being written, `text` writes it later."""
        if id(schema) not in self._name_by_target:
            self._name_by_target[id(schema)] = f"t{len(self._name_by_target)}"
            self._waiting.append(schema)
            if self._num_open < MAX_OPEN and not self._write_target():
                return None
        return self._name_by_target[id(schema)]

    def _write_target(self) -> bool:
        """Write the rule of the last target in `_waiting`; return False if it has no values."""
        schema = self._waiting.pop()
        self._num_open += 1
        definition = self._value(schema)
        self._num_open -= 1
        self._targets.append(f"{self._name_by_target[id(schema)]}: {definition}")
        return definition is not None

    def _constants(self, values: list[object]) -> str | None:
        exact, numbers, options = list[object](), list[object](), list[str | None]()
        for value in values:
            if inexact_number(value) is None:
                exact.append(value)
            elif isinstance(value, list):
                options.append(
                    self._rule('"[" ' + ' "," '.join(str(self._constants([each])) for each in value) + ' "]"')
                )
            elif isinstance(value, dict):
                pairs = (f'{_literal(name)} ":" {self._constants([each])}' for name, each in value.items())
                options.append(self._rule('"{" ' + ' "," '.join(pairs) + ' "}"'))
            else:
                numbers.append(value)
        if numbers:
            options.append(self._rule(" | ".join(f'"{each}"' for each in numbers), "N"))
        return self._any([*options, self._schema({"enum": exact}) if exact else None])

    def _typed(self, schema: Schema) -> str | None:
        """Return a rule for a schema without references, unions or listed values: the alternatives of its types."""
        others, options = list[str](), list[str | None]()
        for each in _listed(schema.get("type", _TYPES)):
            own = {name: schema[name] for name in _KEYWORDS_BY_TYPE.get(each, ()) if name in schema}
            if each == "object" and self._leads_on(own):
                options.append(self._object(own))
            elif each == "array" and self._leads_on(own):
                options.append(self._array(own))
            elif each in ("integer", "number") and narrowed(schema) != schema:
                options += self._numbers(schema, each)
            else:
                others.append(each)
        if others:
            names = {name for each in others for name in _KEYWORDS_BY_TYPE.get(each, ())}
            names |= schema.keys() - {name for own in _KEYWORDS_BY_TYPE.values() for name in own}
            options.append(self._schema({name: schema[name] for name in schema if name in names} | {"type": others}))
        return self._any(options)

    def _leads_on(self, own: Schema) -> bool:
        return any(part is False or id(part) in self._on_the_way for _, part in subschemas(own))

    def _numbers(self, schema: Schema, kind: str) -> list[str]:
        """Return rules for the numbers within a schema's bounds: integers by their digits, and numbers with decimals,
        which are below 2^53, as a schema."""
        if "multipleOf" in schema:
            own = {name: schema[name] for name in (*BOUNDS, "multipleOf") if name in schema}
            return [self._schema(own | {"type": kind})]
        expression = digits_expression(*integer_bounds(schema))
        found = [self._rule(expression, "N")] if expression else []
        if kind == "number" and (bounds := decimal_bounds(schema)) is not None:
            found.append(self._schema({"type": "number"} | bounds))
        return found

    def _object(self, own: Schema) -> str | None:
        if own.keys() & {"patternProperties", "minProperties", "maxProperties"}:
            return self._schema(own | {"type": "object"})
        others, required = own.get("additionalProperties", True), dict.fromkeys(own.get("required", ()))
        items: list[tuple[str, bool]] = []
        schemas = own.get("properties", {})
        schemas = schemas | {name: others for name in required if name not in schemas}
        for name, part in schemas.items():
            value = self._value(part)
            if value is not None:
                items.append((self._rule(f'{_literal(name)} ":" {value}'), name in required))
            elif name in required:
                return None
        if (value := self._value(others)) is not None:
            taken = " | ".join(map(_literal, schemas))
            key = self._rule(f"{_TEXT} & ~({taken})" if taken else _TEXT, "K")
            pair = self._rule(f'{key} ":" {value}')
            items.append((self._rule(f'{pair} ("," {pair})*'), False))
        if not items:
            return self._rule('"{" "}"')
        may_be_empty = "" if any(is_required for _, is_required in items) else "?"
        return self._rule(f'"{{" ({_some_of(items)}){may_be_empty} "}}"')

    def _array(self, own: Schema) -> str | None:
        first, others = own.get("prefixItems", []), own.get("items", True)
        low, high = own.get("minItems", 0), own.get("maxItems")
        if isinstance(others, list) or "additionalItems" in own or len(first) - low > MAX_TAIL:
            return self._schema(own | {"type": "array"})
        items: list[str] = []
        for part in first[:high]:
            value = self._value(part)
            if value is None:
                high = len(items)
                break
            items.append(value)
        other = self._value(others) if high is None or high > len(items) else None
        if other is None:
            high = len(items)
        elif not items:
            items = [other]
        if high is not None and low > high:
            return None
        if not items:
            return self._rule('"[" "]"')
        num_more = f"{{{max(0, low - len(items))},{'' if high is None else high - len(items)}}}"
        tail = f'("," {other}){num_more}' if other is not None and high != len(items) else ""
        for i in reversed(range(1, len(items))):
            tail = f'"," {items[i]} {tail}' if i < low else f'("," {items[i]} {tail})?'
        return self._rule(f'"[" {items[0]} {tail} "]"' if low else f'"[" ({items[0]} {tail})? "]"')


def _changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return a copy of a schema with `change` applied to it and to all schemas in it, outer ones first."""
    if not isinstance(schema, dict):
        return schema
    return with_subschemas(change(schema), lambda part: _changed(part, change))


def _some_of(items: list[tuple[str, bool]]) -> str:
    """Return an expression for at least one of `items`, in order, with commas between them. An item: its rule, and
    whether it is required. The list is halved so that the expression is not nested as deep as it is long."""
    if len(items) == 1:
        return items[0][0]
    left, right = items[: len(items) // 2], items[len(items) // 2 :]
    more = " ".join(f'("," {rule})' + ("" if is_required else "?") for rule, is_required in right)
    begun = f"{_some_of(left)} {more}"
    return begun if any(is_required for _, is_required in left) else f"({begun} | {_some_of(right)})"


def _literal(name: str) -> str:
    return json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)


def _is_inexact(schema: Schema) -> bool:
    return any(inexact_number(schema.get(name)) is not None for name in _VALUES) or narrowed(schema) != schema


def _values(schema: Schema) -> list[object]:
    """Return the values that `const` and `enum` allow (both, if both are given) and that match the schema's `type`."""
    values = schema.get("enum", [schema.get("const")])
    if "const" in schema:
        constant = json.dumps(schema["const"], sort_keys=True)
        values = [each for each in values if json.dumps(each, sort_keys=True) == constant]
    types = _listed(schema.get("type", _TYPES))
    return [value for value in values if any(_has_type(value, each) for each in types)]


def _common_types(one: str | list[str], other: str | list[str]) -> list[str]:
    """Return the types that two values of `type` have in common; each integer is a number."""
    pairs = [(each, name) for each in _listed(one) for name in _listed(other)]
    integers = ["integer"] if any({*pair} == {"integer", "number"} for pair in pairs) else []
    same = [each for each, name in pairs if each == name]
    return same if {"integer", "number"} & {*same} else same + integers


def _listed(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else types


def _has_type(value: object, name: str) -> bool:
    if isinstance(value, bool) or name not in ("integer", "number"):
        return isinstance(value, _CLASSES.get(name, ()))
    return isinstance(value, int | float) and (name == "number" or value == int(value))


def _without_inexact(schema: Schema) -> Schema:
    if not _is_inexact(schema):
        return schema
    schema = {name: value for name, value in schema.items() if name not in BOUNDS or not is_number(value)}
    return {name: _without_large(value) if name in _VALUES else value for name, value in schema.items()}


def _without_large(value: object) -> object:
    if isinstance(value, list):
        return [_without_large(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_large(each) for name, each in value.items()}
    return value if inexact_number(value) is None else 0
