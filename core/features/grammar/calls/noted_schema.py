"""NotedSchema: translates the values of a schema to rules in a notation other than plain JSON."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from .....ipc.errors import RequestError
from ..schemas.alternatives import Alternatives
from ..schemas.exact_numbers import FINITE_NUMBER, narrowed
from ..schemas.finite_schema import FiniteSchema
from ..schemas.object_keys import OtherKeys
from ..schemas.schema import KEYWORDS, KEYWORDS_BY_TYPE, TYPES, UNIONS, VALUES, Schema, listed, listed_values
from .arguments import MAX_ALTERNATIVES, joined_alternatives
from .counted_pairs import Counts, counted_list, counts_of
from .notation import Notation
from .text_terminal import LIMITS

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NUMERIC = {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


class NotedSchema(FiniteSchema):
    """Translator of one schema, of which all parts become rules; numbers alone are the library's."""

    _kept_whole = frozenset()

    def __init__(self, root: Schema, notation: Notation, prefix: str) -> None:
        super().__init__(root, JSON_OPTIONS, notation.rules.name_by_definition, prefix)
        self._notation = notation
        self._comma, self._colon = notation.comma, notation.colon
        self._inner: dict[str, NotedSchema] = {}  # by the types of values that have another notation
        for name, inner in (("array", notation.lists), ("object", notation.objects)):
            if inner is not None:
                self._inner[name] = NotedSchema(root, inner, f"{prefix}{name[0]}")

    def _new_alternatives(self) -> Alternatives:
        return Alternatives(self._root, self._budget, self._keep, MAX_ALTERNATIVES, joins_all=True)

    @property
    def alternatives(self) -> Alternatives:
        return self._alternatives

    @property
    def targets(self) -> list[str]:
        return [*self._targets, *chain.from_iterable(inner.targets for inner in self._inner.values())]

    def of_type(self, schema: Schema) -> str | None:
        """Return a rule for a schema that the root does not hold, without $ref, allOf, anyOf or oneOf."""
        self._keep(schema)
        rule = self._own_value(schema)
        while self._waiting:
            rule = rule if self._write_target() else None
        return rule

    def _value(self, schema: object) -> str | None:
        if schema is False:
            return None
        if not isinstance(schema, dict) or not schema.keys() & KEYWORDS:
            return self._anything()
        self._keep(schema)
        return super()._value(schema)

    def _knows(self, schema: Schema) -> bool:
        return True

    def _containers(self, name: str) -> list[str]:
        written = super()._containers(name)
        for place, inner in enumerate(map(self._inner.get, ("array", "object"))):
            if inner is not None:
                written[place] = str(inner.of_type({"type": ("array", "object")[place]}))
        return written

    def _scalars(self) -> list[str]:
        notation = self._notation
        words = (notation.word(each) for each in (None, False, True))
        return [notation.text({}), self._numeric({"type": "number"}), *words]

    def _schema(self, schema: Schema) -> str:
        """Return a rule for a schema of numbers. RequestError for others, which cannot become rules."""
        if schema.keys() & KEYWORDS <= _NUMERIC and {*listed(schema.get("type", TYPES))} <= {"integer", "number"}:
            return self._numeric(schema)
        if schema.keys() & {"$ref", "allOf", *UNIONS}:
            joined_alternatives(self._alternatives, schema)
        found = ", ".join(sorted(schema.keys() & KEYWORDS))
        raise RequestError(
            f"structured_outputs.json{self._budget.place}: {found} together cannot be written as rules, which the form "
            "of this model's calls needs: leave one out"
        )

    def _numeric(self, schema: Schema) -> str:
        if schema.keys() & _NUMERIC == {"type"} and "number" in listed(schema["type"]):
            return self._rule(FINITE_NUMBER, "N")
        return super()._schema({name: value for name, value in schema.items() if name in _NUMERIC})

    def _own_value(self, schema: Schema) -> str | None:
        if schema.keys().isdisjoint(VALUES):
            return self._typed(schema)
        if schema.keys() & KEYWORDS <= {*VALUES, "type"}:
            return self._constants(listed_values(schema))
        return self._schema(schema)

    def _constants(self, values: list[object]) -> str | None:
        return self._any(self._rule(self._notation.constant(value)) for value in values)

    def _typed(self, schema: Schema) -> str | None:
        return self._any(self._of_one_type(schema, each) for each in listed(schema.get("type", TYPES)))

    def _of_one_type(self, schema: Schema, name: str) -> str | None:
        own = {each: schema[each] for each in KEYWORDS_BY_TYPE.get(name, ()) if each in schema}
        if name in self._inner:
            return self._inner[name].of_type(own | {"type": name})
        if name == "object":
            return self._object(own)
        if name == "array":
            return self._array(own)
        if name == "string":
            return self._rule(self._notation.text({each: schema[each] for each in LIMITS if each in schema}))
        if name in ("integer", "number"):
            numbers = {each: schema[each] for each in _NUMERIC if each in schema} | {"type": name}
            return self._any(self._numbers(schema, name)) if narrowed(numbers) != numbers else self._numeric(numbers)
        return self._any(map(self._notation.word, (None,) if name == "null" else (False, True)))

    def _object(self, own: Schema) -> str | None:
        counts = counts_of(own)
        if counts == Counts(0, None):
            return super()._object(own)
        members = self._members(own)
        if members is None:
            return None
        pairs = counted_list(members.named, self._any(members.others) or "", counts, self._comma, self._rule)
        return pairs and self._rule(f'"{{" {pairs} "}}"')

    def _array(self, own: Schema) -> str | None:
        if isinstance(own.get("items"), list):  # of older drafts
            others = own.get("additionalItems", False)
            own = {name: value for name, value in own.items() if name != "additionalItems"}
            own |= {"prefixItems": own["items"], "items": others}
        return super()._array(own)

    def _key(self, name: str) -> str:
        return self._notation.key(name)

    def _other_key(self, taken: Iterable[str], keys: OtherKeys) -> str:
        return self._notation.other_key(taken, keys)
