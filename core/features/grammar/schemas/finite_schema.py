"""FiniteSchema: translates a schema of which all numbers are to be within float64 to rules.

The library writes a number without bounds with any exponent, such as 1e999, which readers take for infinite. Wherever a
value may be, or contain, such a number, it becomes rules; where no rules are possible, the number gets bounds.
"""

from __future__ import annotations

from .exact_numbers import BOUNDS, EXACT, FINITE_NUMBER
from .inexact_paths import REST
from .lark_schema import LarkSchema
from .object_keys import OtherKeys
from .schema import ANNOTATIONS, KEYWORDS, Schema, listed


class FiniteSchema(LarkSchema):
    """Translator of one schema. `is_needed`: it allows numbers that are too large, or that the library would round."""

    _has_finite_numbers = True
    _has_anything = False  # the rule for any value is written

    def _value(self, schema: object) -> str | None:
        if schema is False:
            return None
        if not isinstance(schema, dict) or schema.keys() <= ANNOTATIONS:
            return self._anything()
        if not self._knows(schema):
            return self._schema(schema)  # which the library refuses, unless it knows the other keywords
        return super()._value(schema)

    def _knows(self, schema: Schema) -> bool:
        """Return whether a schema has no keywords but those that rules are written of, and annotations."""
        return schema.keys() <= KEYWORDS | ANNOTATIONS

    def _anything(self) -> str:
        """Return the name of a rule for any value."""
        name = f"{self._prefix}any"
        if not self._has_anything:
            self._has_anything = True
            self._targets.append(f"{name}: {' | '.join([*self._containers(name), *self._scalars()])}")
        return name

    def _containers(self, name: str) -> list[str]:
        """Return expressions for lists and for objects of values of the rule `name`."""
        key = self._other_key((), OtherKeys(True))
        pair = f"{key} {self._colon} {name}"
        return [f'"[" ({name} ({self._comma} {name})*)? "]"', f'"{{" ({pair} ({self._comma} {pair})*)? "}}"']

    def _scalars(self) -> list[str]:
        """Return rules for all values but lists and objects."""
        return [self._schema({"type": ["null", "boolean", "string"]}), self._rule(FINITE_NUMBER, "N")]

    def _leads_on(self, own: Schema, kind: str) -> bool:
        return own.get(REST[kind], True) is True or super()._leads_on(own, kind)

    def _needs_rules(self, schema: Schema, kind: str) -> bool:
        return (kind == "number" and _is_free(schema)) or super()._needs_rules(schema, kind)

    def _numbers(self, schema: Schema, kind: str) -> list[str]:
        if kind == "number" and _is_free(schema):
            return [self._rule(FINITE_NUMBER, "N")]
        return super()._numbers(schema, kind)

    def _narrowed(self, schema: Schema) -> Schema:
        if "number" in listed(schema.get("type", [])) and _is_free(schema):
            schema = schema | {"minimum": -EXACT, "maximum": EXACT}  # no such number has an exponent
        return super()._narrowed(schema)


def _is_free(schema: Schema) -> bool:
    return schema.keys().isdisjoint((*BOUNDS, "multipleOf"))
