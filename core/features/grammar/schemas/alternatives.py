"""Alternatives: a schema with unions and references as a list of schemas without any, one for each combination."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Literal

from .....ipc.params.json_schema import at_pointer
from .exact_numbers import BOUNDS, LOWER
from .schema import ARRAY, OBJECT, OWN, UNIONS, VALUES, Schema, common_types, json_key, listed
from .translation_budget import TranslationBudget

MAX_ALTERNATIVES = 64  # alternatives of a schema with several unions
MAX_LEVELS = 8  # levels of references to references


class Alternatives:
    """Combiner of the parts of one root schema. `on_made` gets each schema that the root does not hold."""

    def __init__(
        self,
        root: Schema,
        budget: TranslationBudget,
        on_made: Callable[[Schema], None],
        most: int = MAX_ALTERNATIVES,
        *,
        joins_all: bool = False,
    ) -> None:
        """most: alternatives of a schema. joins_all: texts may have a list of patterns, and objects counts."""
        self._root = root
        self._most = most
        self._joins_all = joins_all
        self._budget = budget
        self._on_made = on_made

    def of(self, schema: object, level: int = 0) -> list[list[Schema]] | None:
        """Return the alternatives of a schema with unions, in the library's order. Each is a list of schemas without
        $ref, allOf or unions that must all hold. None if there are more than `most`, or if references lead
        through more than MAX_LEVELS others, as those of a schema that refers to itself do."""
        if not isinstance(schema, dict):
            return [] if schema is False else [[]]
        self._budget.spend(1)
        own = {name: value for name, value in schema.items() if name in OWN}
        own_at = "properties" if "properties" in own else next(iter(own), None)  # its place decides the order
        found: list[list[Schema]] = [[]]
        for keyword, value in schema.items():
            if keyword == own_at:
                choices: list[list[list[Schema]] | None] = [[[own]]]
            elif keyword == "$ref":
                target = at_pointer(self._root, value)
                choices = [self.of(target, level + 1) if level < MAX_LEVELS else None]
            elif keyword == "allOf":
                choices = [self.of(part, level) for part in value]
            elif keyword in UNIONS:
                branches = [self.of(part, level) for part in value]
                choices = [None if None in branches else list(chain(*filter(None, branches)))]
            else:
                continue
            for choice in choices:
                if choice is None or len(found) * len(choice) > self._most:
                    return None
                found = [[*left, *right] for left in found for right in choice]
        return found

    def joined(self, parts: list[Schema]) -> Schema | Literal[False] | None:
        """Return one schema for schemas that must all hold; False if no value conforms, None if the keywords known here
        cannot express it."""
        result: Schema = {}
        objects = [part for part in parts if not part.keys().isdisjoint(OBJECT)]
        for part in parts:
            for name, value in part.items():
                if name == "type" and name in result:
                    value = common_types(result[name], value)
                elif name in BOUNDS and isinstance(value, bool) and len(parts) > 1:  # of draft 4
                    return None
                elif name in BOUNDS and name in result:
                    value = (max if name in LOWER else min)(result[name], value)
                elif name == "enum" and name in result:
                    common = {*map(json_key, result[name])}
                    value = [each for each in value if json_key(each) in common]
                elif self._joins_all and name == "pattern" and name in result:
                    value = [*listed(result[name]), *listed(value)]
                elif self._joins_all and name in ("minLength", "maxLength") and name in result:
                    value = (max if name == "minLength" else min)(result[name], value)
                elif name in result and name not in OBJECT and json_key(result[name]) != json_key(value):
                    return False if name == "const" else None
                result[name] = value
        if result.get("type") == [] or result.get("enum") == []:
            return False
        if sum(not part.keys().isdisjoint(ARRAY) for part in parts) > 1 or (
            not result.keys().isdisjoint(VALUES) and result.keys() - {*VALUES, "type"}
        ):
            return None
        if len(objects) < 2:
            return result
        together = self._together(objects)
        return None if together is None else result | together

    def _together(self, objects: list[Schema]) -> Schema | None:
        """Return the keywords of objects that conform to all of `objects`; None if those known here cannot express
        it."""
        kept = {"patternProperties"} if self._joins_all else {"patternProperties", "minProperties", "maxProperties"}
        if any(part.keys() & kept for part in objects):
            return None
        counts: Schema = {}
        for name, strictest in (("minProperties", max), ("maxProperties", min)):
            if given := [part[name] for part in objects if name in part]:
                counts[name] = strictest(given)
        others = [part.get("additionalProperties", True) for part in objects]
        own = [part.get("properties", {}) for part in objects]
        required = list(dict.fromkeys(name for part in objects for name in part.get("required", ())))
        names = dict.fromkeys([*chain(*own), *required])
        schemas = {name: [part.get(name, other) for part, other in zip(own, others, strict=True)] for name in names}
        self._budget.spend(len(schemas) * len(objects))
        properties = {name: self._both(each) for name, each in schemas.items()}
        return {"properties": properties, "required": required, "additionalProperties": self._both(others)} | counts

    def _both(self, schemas: list[object]) -> object:
        """Return a schema for values that conform to all of `schemas`."""
        if False in schemas:
            return False
        limits = [each for each in schemas if each not in (True, {})]
        if len(limits) < 2:
            return limits[0] if limits else True
        both = {"allOf": limits}
        self._on_made(both)
        return both
