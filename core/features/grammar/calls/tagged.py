"""TaggedArguments: rules for arguments that stand one by one between joints, texts without quotes.

A text ends where the marker begins that closes a value, so no text holds this marker, and neither does a text inside of
another value. If a value may be a text or something else, a frontend decides by the text; then texts that it
would read as something else conform to that, or are not allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from .....ipc.errors import RequestError
from .....ipc.params.call_form import CallForm
from ..schemas.schema import KEYWORDS_BY_TYPE, TYPES, VALUES, Schema, has_type, listed, listed_values
from .arguments import Pair, any_of, flat_objects, joined_alternatives, pairs_of
from .counted_pairs import Counts, counts_of
from .lark_rules import Closing, LarkRules, first_held, quoted, without
from .notation import json_notation
from .noted_schema import NotedSchema
from .text_terminal import LIMITS, conditions

CDATA = "<![CDATA["  # frontends remove it around a value
_JSON_BEGINS = {"object": r"\{", "array": r"\[", "number": "[-0-9]", "integer": "[-0-9]"}
Rules: TypeAlias = list[str | None]  # by the number of pairs before; "": of no pairs, None: none conform
_SCALARS = ("null", "boolean", "integer", "number")


class TaggedArguments:
    """Writer of the rules of one tool's calls, from behind the name to the joint behind the call."""

    def __init__(
        self,
        form: CallForm,
        rules: LarkRules,
        schema: Schema,
        prefix: str,
        tails: tuple[str, str],
        expanded: Callable[[str], str],
        value_ends: Iterable[str],
    ) -> None:
        """tails: the joints behind a call, and behind the name of one without arguments. `expanded` returns an
        expression for a joint. value_ends: see CallsConstraint."""
        self._form, self._rules, self._prefix = form, rules, prefix
        self._tail, self._empty_tail = tails
        closings = [rules.split(joint)[0].marker for joint in (form.pair, self._tail, *value_ends) if joint.strip()]
        self._markers = (*dict.fromkeys(closings), CDATA)
        self._mids = [rules.split(joint)[0].marker for joint in (form.mid, *form.mid_by_type.values())]
        self._schema = NotedSchema(schema, json_notation(rules, self._markers), prefix)
        self._num_rules = 0
        self._expanded = expanded

    @property
    def targets(self) -> list[str]:
        return self._schema.targets

    def rule(self, root: Schema) -> str | None:
        """Return a rule for the arguments of a call; None if none conform."""
        return any_of(self._object(each) for each in flat_objects(self._schema.alternatives, root))

    def _object(self, schema: Schema) -> str | None:
        pairs = list(pairs_of(schema, self._rules))
        counts = counts_of(schema)
        followed: Rules = [""] * (counts.cap + 1)  # by the last key
        is_needed = False
        for pair in reversed(pairs):
            rules: Rules = [None] * len(followed)
            for count in reversed(range(len(followed))):
                if not counts.is_full(count):
                    again = rules[counts.after(count)]
                    rules[count] = self._pair_from(pair, count, counts, again, followed, may_end=not is_needed)
                elif not is_needed and not pair.is_required:
                    rules[count] = ""
            followed = rules
            is_needed |= pair.is_required
        first = [f"{self._expanded(self._form.first)} {followed[0]}"] if followed[0] else []
        if not is_needed and not counts.low:
            first.append(self._expanded(self._empty_tail) or '""')
        return any_of(first)

    def _pair_from(
        self, pair: Pair, count: int, counts: Counts, again: str | None, followed: Rules, *, may_end: bool
    ) -> str | None:
        """Return a rule for a pair and those behind it, at least one of them, with the tail behind; "" if there are
        none, None if none conform. count: of the pairs before. again: the rule for the same pair with one more before.
        followed: the rules for those behind the pair, by the number of pairs before them. may_end: none of these is
        required."""
        name = f"{self._prefix}p{self._num_rules}"
        self._num_rules += 1
        after = counts.after(count)
        following = followed[after]
        if not pair.name:
            following = (name if after == count else again) or following
        may_end = may_end and after >= counts.low
        ways = []
        if not pair.name and "{KEY}" in self._form.pair + self._tail:
            raise RequestError("structured_outputs.json: other keys cannot be repeated in this model's calls: name all")
        if pair.name != pair.name.strip() or first_held(pair.name, self._mids):
            raise RequestError(
                f"structured_outputs.json: the key {pair.name!r:.80} cannot be written in the form of this model's "
                "calls: use letters, digits and underscores"
            )
        for closing, rest in self._closings(pair, following or "", may_end=may_end).items():
            behind = " | ".join(rest)
            for key, schema in pair.choices:
                for mid, value in self._values(schema, closing):
                    ways.append(f"{key} {self._expanded(mid)} {value} ({behind})")
        if not ways and pair.is_required:
            return None
        if not ways:
            return followed[count]
        if not pair.is_required and followed[count]:
            ways.append(str(followed[count]))
        self._rules.add(name, " | ".join(ways))
        return name

    def _closings(self, pair: Pair, following: str, *, may_end: bool) -> dict[Closing, list[str]]:
        """Return what may stand behind a value, by how it begins."""
        found: dict[Closing, list[str]] = {}
        joints = [(self._form.pair, following)] if following else []
        for joint, goal in [*joints, *([(self._tail, "")] if may_end else [])]:
            closing, rest = self._rules.split(joint.replace("{KEY}", pair.name))
            found.setdefault(closing, []).append(f"{self._expanded(rest)} {goal}".strip() or '""')
        return found

    def _values(self, schema: object, closing: Closing) -> Iterator[tuple[str, str]]:
        """Yield the joint before a value and an expression for the value with its closing, for each way to write it."""
        texts, constants, others = self._ways_to_write(schema)
        mids = self._form.mid_by_type
        if not mids:
            ways = self._written(texts, constants, others, closing)
            if ways:
                yield self._form.mid, f"({' | '.join(ways)})"
            return
        ways = self._written(texts, [each for each in constants if isinstance(each, str)], [], closing)
        if ways:
            yield mids.get("string", self._form.mid), f"({' | '.join(ways)})"
        words = [each for each in constants if not isinstance(each, str)]
        others = others + ([{"enum": words}] if words else [])
        for other in others:
            for name in _types_of(other):
                rule = self._schema.of_type(_of_type(other, name))
                if rule is not None:
                    mid = mids.get("number" if name == "integer" else name, mids.get("other", self._form.mid))
                    yield mid, f"{rule} {self._closing(closing)}"

    def _ways_to_write(self, schema: object) -> tuple[list[Schema], list[object], list[Schema]]:
        """Return the ways to write a value: schemas of texts, constants, and schemas of other values."""
        alternatives = self._schema.alternatives
        texts, constants, others = list[Schema](), list[object](), list[Schema]()
        for each in joined_alternatives(alternatives, schema):
            if each.keys() & {*VALUES}:
                constants += listed_values(each)
                continue
            types = listed(each.get("type", TYPES))
            if "string" in types:
                texts.append({name: each[name] for name in LIMITS if name in each})
            if rest := [name for name in types if name != "string"]:
                others.append(each | {"type": rest})
        return texts, constants, others

    def _written(
        self, texts: list[Schema], constants: list[object], others: list[Schema], closing: Closing
    ) -> list[str]:
        """Return expressions for values with the closing behind them."""
        is_free = any(not each for each in texts)
        words = list[str]()
        for each in constants:
            if not isinstance(each, list | dict):
                text = each if isinstance(each, str) else json.dumps(each)
                words += [] if first_held(text, self._markers) else [text]
        others = others + ([{"enum": lists}] if (lists := [e for e in constants if isinstance(e, list | dict)]) else [])
        begins, ways = set[str](), list[str]()
        for schema in others:
            for name in _types_of(schema):
                own = _of_type(schema, name)
                if is_free and name in _SCALARS and own.keys() == {"type"}:
                    continue  # any text is read as such a value, or is a text
                if name in ("null", "boolean"):
                    words += {"null": ["null"], "boolean": ["true", "false"]}[name]
                    continue
                rule = self._schema.of_type(own)
                if rule is not None:
                    begins.add(_JSON_BEGINS[name])
                    ways.append(f"{rule} {self._closing(closing)}")
        if words:
            ways.append(self._rules.closed(" | ".join(map(quoted, dict.fromkeys(words))), closing))
        not_json = [rf"~/\s*({'|'.join(sorted(begins))})(?s:.*)/"] if begins else []
        not_words = [rf"~/\s*({'|'.join(map(_escaped, words))})\s*/"] if words and not is_free and others else []
        for each in texts:
            body = " & ".join([without(self._markers), *conditions(each), *not_json, *not_words])
            ways.append(self._rules.closed(body, closing))
        return ways

    def _closing(self, closing: Closing) -> str:
        return self._rules.exact(closing.space + closing.marker)


def _types_of(schema: Schema) -> list[str]:
    """Return the types of a schema of values that are no texts."""
    if "enum" in schema:
        return [name for name in TYPES if any(has_type(each, name) for each in schema["enum"])]
    return listed(schema.get("type", [each for each in TYPES if each != "string"]))


def _of_type(schema: Schema, name: str) -> Schema:
    """Return the part of a schema for one type."""
    if "enum" in schema:
        return {"enum": [each for each in schema["enum"] if has_type(each, name)]}
    known = {*KEYWORDS_BY_TYPE.get(name, ())} | ({"multipleOf"} if name in ("integer", "number") else set())
    return {each: value for each, value in schema.items() if each in known} | {"type": name}


def _escaped(text: str) -> str:
    return re.sub(r"[^\w ]", lambda found: rf"\x{{{ord(found[0]):x}}}", text)
