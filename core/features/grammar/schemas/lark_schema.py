"""LarkSchema: translates a schema whose numbers the grammar library would round to a Lark grammar of the same texts.

The library reads a schema's numbers as float64, but a Lark grammar may contain both regular expressions and schemas. So
the path from the root to each such number (objects, arrays, unions, references) becomes rules, the number becomes an
expression over its digits, and everything else stays a schema. If the path contains other keywords (minProperties,
multipleOf), the schema stays, too: bounds are moved inwards, and a `const` or `enum` is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .....ipc.errors import RequestError
from .....ipc.params.json_schema import at_pointer, subschemas
from .alternatives import Alternatives
from .exact_numbers import BOUNDS, decimal_bounds, digits_expression, inexact_number, integer_bounds, narrowed
from .inexact_paths import paths_to_inexact, without_inexact
from .key_pattern import KeyPatterns
from .object_keys import OtherKeys, named_values, other_keys
from .schema import (
    DEFINITIONS,
    KEYWORDS,
    KEYWORDS_BY_TYPE,
    TYPES,
    UNIONS,
    VALUES,
    Schema,
    changed,
    listed,
    listed_values,
)
from .translation_budget import TranslationBudget

MAX_TAIL = 16  # items of a tuple that may be absent
MAX_OPEN = 50  # nested targets of references that are written at once
# a JSON string, with the escapes that the library writes: those of control characters
_TEXT = r'/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00([01][0-9a-fA-F]|7[fF]))*"/'

_PLAIN = r'/[^"\\\x00-\x1f\x7f]*/'  # the inside of one without escapes


class Members(NamedTuple):
    """Rules for the pairs of an object: for each that has a name, with whether it is required, and for others."""

    named: list[tuple[str, bool]]
    others: list[str]


class LarkSchema:
    """Translator of one schema, which it does not change; owns the rules written so far. `is_needed`: the schema has
    numbers that the library would round."""

    _has_finite_numbers = False  # numbers without bounds become rules, too
    _kept_whole = frozenset(("minProperties", "maxProperties"))  # no rules of objects have these

    def __init__(
        self, root: Schema, options: Mapping[str, object], rules: dict[str, str] | None = None, prefix: str = ""
    ) -> None:
        """`rules`: those of a grammar that the schema becomes a part of; names of its own begin with `prefix`."""
        self._root, self._options, self._prefix = root, options, prefix
        self._comma = _separator(options, "item_separator", ",")
        self._colon = _separator(options, "key_separator", ":")
        self._budget = TranslationBudget(root)
        self._alternatives = self._new_alternatives()
        # ids of the schemas on the paths to such numbers; whether a reference is no pointer into the root
        self._on_the_way, self._has_other_references = paths_to_inexact(
            root, has_finite_numbers=self._has_finite_numbers
        )
        self._rules: dict[str, str] = {} if rules is None else rules  # names by definition
        self._name_by_target: dict[int, str] = {}
        self._made: list[Schema] = []  # schemas that the root does not hold: another must not get their ids
        self._targets: list[str] = []  # definitions of references
        self._waiting: list[object] = []  # targets without a rule
        self._key_patterns = KeyPatterns()
        self._num_open = 0  # targets that lead to the one that is being written

    @property
    def is_needed(self) -> bool:
        return bool(self._on_the_way)

    def outline(self) -> Schema:
        """Return the schema without the numbers that would be rounded, so that the library can check the rest."""
        return dict(changed(self._root, without_inexact))

    def narrowed(self) -> Schema:
        """Return the schema with bounds moved inwards. RequestError for a `const` or `enum` that would be rounded."""
        self._budget = TranslationBudget(self._root)
        return dict(changed(self._root, self._narrowed))

    def text(self) -> str | None:
        """Return the grammar in Lark; None if a number cannot be kept exact, a reference is no pointer into the root,
        the schema has no values, or the translation would be too large, too deep or too slow."""
        start = self.exact_rule()
        if start is None:
            return None
        head = []
        if "whitespace_pattern" in self._options:
            head = ['%llguidance {"ignore_once": true}', f"%ignore /{self._options['whitespace_pattern']}/"]
        rules = [f"{name}: {definition}" for definition, name in self._rules.items()]
        return "\n".join([*head, f"start: {start}", *self._targets, *rules])

    def exact_rule(self) -> str | None:
        """Return a rule for the whole schema, which names `targets`; None as in `text`."""
        if self._has_other_references:
            return None
        self._budget = TranslationBudget(self._root)  # of time, too: a slow compiler of the outline has not used it
        self._alternatives = self._new_alternatives()
        try:
            return self.rule_of(self._root)
        except (RequestError, RecursionError):
            return None

    def _new_alternatives(self) -> Alternatives:
        return Alternatives(self._root, self._budget, self._keep)

    @property
    def targets(self) -> list[str]:
        """The definitions of the rules that others name before they are defined."""
        return self._targets

    def rule_of(self, schema: object) -> str | None:
        """Return a rule for the values of a part of the root; None if there are none. RequestError as in `text`."""
        start = self._value(schema)
        while self._waiting:
            start = start if self._write_target() else None
        return start

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
        keywords = schema.keys() & KEYWORDS
        if keywords == {"$ref"}:
            return self._target(at_pointer(self._root, schema["$ref"]))
        if keywords == {"allOf"} and len(schema["allOf"]) == 1:
            return self._value(schema["allOf"][0])
        if keywords in ({"anyOf"}, {"oneOf"}):
            return self._any(self._value(part) for part in schema[keywords.pop()])
        if keywords & {"$ref", "allOf", *UNIONS}:
            alternatives = self._alternatives.of(schema)
            joined = None if alternatives is None else [self._alternatives.joined(parts) for parts in alternatives]
            if joined is None or None in joined:
                return self._schema(schema)
            return self._any(self._own_value(each) for each in joined if isinstance(each, dict))
        return self._own_value(schema)

    def _own_value(self, schema: Schema) -> str | None:
        """Return a rule for a schema without $ref, allOf, anyOf or oneOf; None if it has no values."""
        if schema.keys().isdisjoint(VALUES):
            return self._typed(schema)
        if schema.keys() & KEYWORDS <= {*VALUES, "type"}:
            return self._constants(listed_values(schema))
        return self._schema(schema)

    def _keep(self, made: Schema) -> None:
        """Translate a schema that the root does not hold as one on the paths; its id stays its own."""
        self._made.append(made)
        self._on_the_way.add(id(made))

    def _any(self, options: Iterable[str | None]) -> str | None:
        found = list(dict.fromkeys(each for each in options if each is not None))
        return self._rule(" | ".join(found)) if len(found) > 1 else found[0] if found else None

    def _schema(self, schema: Schema) -> str:
        """Return a rule that contains the schema itself, with bounds moved inwards. RequestError if a `const` or `enum`
        has a number that would be rounded."""
        name_by_reference: dict[str, str] = {}
        todo = list[str]()

        def change(part: Schema) -> Schema:
            result = {key: value for key, value in self._narrowed(part).items() if key not in DEFINITIONS}
            if (reference := result.get("$ref")) is not None:
                if reference not in name_by_reference:
                    name_by_reference[reference] = str(len(name_by_reference))
                    todo.append(reference)
                result["$ref"] = "#/$defs/" + name_by_reference[reference]
            return result

        document = changed(schema, change)
        definitions: Schema = {}
        while todo:
            reference = todo.pop()
            definitions[name_by_reference[reference]] = changed(at_pointer(self._root, reference), change)
        document |= {"$defs": definitions, "x-guidance": self._options}
        document |= {"$schema": self._root["$schema"]} if "$schema" in self._root else {}
        return self._rule("%json " + json.dumps(document, ensure_ascii=False))

    def _narrowed(self, schema: Schema) -> Schema:
        self._budget.enter(schema)
        number = next((each for name in VALUES if (each := inexact_number(schema.get(name))) is not None), None)
        if number is not None:
            raise RequestError(
                f"structured_outputs.json{self._budget.place}: {str(number)[:40]} cannot be kept exact beside or below "
                "minProperties, maxProperties or multipleOf, nor in a schema of many alternatives: write it without "
                'these, or make it a text, {"type": "string"}'
            )
        return narrowed(schema)

    def _target(self, schema: object) -> str | None:
        """Return the name of the rule for a reference's target, which may refer to itself; None if it has no values.
        If MAX_OPEN targets are being written, `text` writes it later."""
        if id(schema) not in self._name_by_target:
            self._name_by_target[id(schema)] = f"{self._prefix}t{len(self._name_by_target)}"
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
                    self._rule('"[" ' + self._joined(str(self._constants([each])) for each in value) + ' "]"')
                )
            elif isinstance(value, dict):
                pairs = (f"{self._key(name)} {self._colon} {self._constants([each])}" for name, each in value.items())
                options.append(self._rule('"{" ' + self._joined(pairs) + ' "}"'))
            else:
                numbers.append(value)
        if numbers:
            options.append(self._rule(" | ".join(f'"{each}"' for each in numbers), "N"))
        return self._any([*options, self._schema({"enum": exact}) if exact else None])

    def _typed(self, schema: Schema) -> str | None:
        """Return a rule for a schema without references, unions or listed values: the alternatives of its types."""
        others, options = list[str](), list[str | None]()
        for each in listed(schema.get("type", TYPES)):
            own = {name: schema[name] for name in KEYWORDS_BY_TYPE.get(each, ()) if name in schema}
            if each == "object" and self._leads_on(own, each):
                options.append(self._object(own))
            elif each == "array" and self._leads_on(own, each):
                options.append(self._array(own))
            elif each in ("integer", "number") and self._needs_rules(schema, each):
                options += self._numbers(schema, each)
            else:
                others.append(each)
        if others:
            names = {name for each in others for name in KEYWORDS_BY_TYPE.get(each, ())}
            names |= schema.keys() - {name for own in KEYWORDS_BY_TYPE.values() for name in own}
            options.append(self._schema({name: schema[name] for name in schema if name in names} | {"type": others}))
        return self._any(options)

    def _leads_on(self, own: Schema, kind: str) -> bool:
        return any(part is False or id(part) in self._on_the_way for _, part in subschemas(own))

    def _needs_rules(self, schema: Schema, kind: str) -> bool:
        """Return whether numbers of a schema become rules."""
        return narrowed(schema) != schema

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
        if own.keys() & self._kept_whole:
            return self._schema(own | {"type": "object"})
        members = self._members(own)
        if members is None:
            return None
        items = members.named
        if (pair := self._any(members.others)) is not None:
            items = [*items, (self._rule(f"{pair} ({self._comma} {pair})*"), False)]
        if not items:
            return self._rule('"{" "}"')
        may_be_empty = "" if any(is_required for _, is_required in items) else "?"
        return self._rule(f'"{{" ({self._some_of(items)}){may_be_empty} "}}"')

    def _members(self, own: Schema) -> Members | None:
        """Return the pairs of an object's schema; None if a required one has no values."""
        required = dict.fromkeys(own.get("required", ()))
        members = Members([], [])
        schemas = named_values(own, self._key_patterns)
        for name, part in schemas.items():
            value = self._value(self._kept(part))
            if value is not None:
                members.named.append((self._rule(f"{self._key(name)} {self._colon} {value}"), name in required))
            elif name in required:
                return None
        for keys in other_keys(own):
            if (value := self._value(keys.schema)) is not None:
                members.others.append(self._rule(f"{self._other_key(schemas, keys)} {self._colon} {value}"))
        return members

    def _kept(self, part: object) -> object:
        """Return the schema of a named value. If several were joined to it, it is translated as one on the paths."""
        if isinstance(part, dict) and part.keys() == {"allOf"}:
            self._keep(part)
        return part

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
        tail = f"({self._comma} {other}){num_more}" if other is not None and high != len(items) else ""
        for i in reversed(range(1, len(items))):
            more = f"{self._comma} {items[i]} {tail}"
            tail = more if i < low else f"({more})?"
        return self._rule(f'"[" {items[0]} {tail} "]"' if low else f'"[" ({items[0]} {tail})? "]"')

    def _some_of(self, items: list[tuple[str, bool]]) -> str:
        """Return an expression for at least one of `items`, in order, with commas between them. An item: its rule, and
        whether it is required. The list is halved so that the expression is not nested as deep as it is long."""
        if len(items) == 1:
            return items[0][0]
        left, right = items[: len(items) // 2], items[len(items) // 2 :]
        more = " ".join(f"({self._comma} {rule})" + ("" if is_required else "?") for rule, is_required in right)
        begun = f"{self._some_of(left)} {more}"
        return begun if any(is_required for _, is_required in left) else f"({begun} | {self._some_of(right)})"

    def _joined(self, rules: Iterable[str]) -> str:
        return f" {self._comma} ".join(rules)

    def _key(self, name: str) -> str:
        """Return an expression for a key."""
        return _literal(name)

    def _other_key(self, taken: Iterable[str], keys: OtherKeys) -> str:
        """Return an expression for any of `keys` but those that are `taken`. Beside patterns a key has no escapes: the
        patterns are about the text itself."""
        conditions = list(keys.conditions())
        others = " | ".join(map(_literal, taken))
        terminal = _TEXT
        if conditions:
            terminal = f'"\\"" ({" & ".join([_PLAIN, *conditions])}) "\\""'
        return self._rule(f"{terminal} & ~({others})" if others else terminal, "K")


def _literal(name: str) -> str:
    return json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)


def _separator(options: Mapping[str, object], name: str, usual: str) -> str:
    """Return a literal for the usual separator, or the expression that the options give in its place."""
    expression = options.get(name, usual)
    return f'"{usual}"' if expression == usual else f"/{expression}/"
