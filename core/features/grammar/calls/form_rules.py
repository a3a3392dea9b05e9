"""FormRules: the grammar of calls in one form, from the marker before the first to the end of the last.

The joints of the form are written as the chat template renders them. Knows no text around the calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

from .....ipc.errors import RequestError
from .....ipc.params.call_form import PLACE, CallForm
from .....ipc.params.calls_constraint import CallsConstraint
from ..schemas.finite_schema import FiniteSchema
from ..schemas.json_schema import adapted
from ..schemas.schema import Schema
from .arguments import any_of
from .lark_rules import LarkRules
from .literal import LiteralArguments
from .noted_schema import JSON_OPTIONS
from .object_shape import shape_with_places
from .tagged import TaggedArguments

_COUNT = "/[0-9]{1,4}/"
_ANY_OBJECT: Schema = {"type": "object"}


class FormRules:
    """Translator of the calls of one constraint in one form. `marker`: the text that begins them; "" if none does.
    `targets`: further rules, once the expressions are made."""

    def __init__(
        self, form: CallForm, constraint: CallsConstraint, rules: LarkRules, prefix: str, *, is_exact: bool
    ) -> None:
        """prefix: of the names of its rules. `is_exact`: see CallRules."""
        self._form = form
        self._constraint = constraint
        self._rules = rules
        self._prefix = prefix
        self._is_exact = is_exact
        self._numbers = count()
        before, found, behind = form.start.partition("{NAME}")
        self._start, self._head = before, found + behind  # a head stands before the name of each call
        before, found, behind = form.next.partition("{NAME}") if found else (form.next, "", "")
        self._next, self._further_head = before, found + behind
        self.marker = rules.split(self._start)[0].marker
        self.targets: list[str] = []

    def answer(self) -> str:
        """Return an expression for the calls. RequestError, with the tool's name, for a schema that cannot be
        served."""
        return f"{self._expanded(self._start)} {self._calls()}"

    def behind_marker(self) -> str:
        """Return an expression for the calls behind their marker. RequestError as in `answer`."""
        return f"{self._expanded(self._start.lstrip()[len(self.marker) :])} {self._calls()}"

    def begins(self) -> Iterator[str]:
        """Yield the texts with which calls without a start begin."""
        for name in self._constraint.tools:
            begin = self._shape().split("{NAME}")[0] if self._form.kind == "object" else name
            yield begin.strip()[:1] if self._form.kind == "object" else name

    def _calls(self) -> str:
        """Return an expression for the calls behind the first start."""
        lasts = self._each_call(self._head, self._form.end, self._form.empty_end)
        if self._constraint.has_one_call or not self._form.next:
            return lasts
        empty = self._form.empty_next.partition("{NAME}")[0] if self._head else self._form.empty_next
        firsts = self._each_call(self._head, self._next, empty)
        if not self._head:
            return f"{firsts}* {lasts}"
        more = self._each_call(self._further_head, self._next, empty)
        return (
            f"({lasts} | {firsts} {more}* {self._each_call(self._further_head, self._form.end, self._form.empty_end)})"
        )

    def _each_call(self, head: str, tail: str, empty_tail: str) -> str:
        """Return an expression for a call of any tool, from the head before its name to the joint behind it."""
        calls = [self._call(name, head, tail, empty_tail) for name in self._constraint.tools]
        found = any_of(calls)
        if found is None:
            raise RequestError("structured_outputs.json: no arguments conform to the schema of any tool")
        return self._rules.rule(found)

    def _call(self, name: str, head: str, tail: str, empty_tail: str) -> str | None:
        form, prefix = self._form, f"{self._prefix}_{next(self._numbers)}"
        try:
            schema = adapted(_ANY_OBJECT | (self._constraint.tools[name] or {}))
            head = self._expanded(head, name)
            if form.kind == "tagged":
                tails = (tail.replace("{NAME}", name), (empty_tail or tail).replace("{NAME}", name))
                expanded = partial(self._expanded, name=name)
                tagged = TaggedArguments(
                    form, self._rules, schema, prefix, tails, expanded, self._constraint.value_ends
                )
                arguments = tagged.rule(schema)
                self.targets += tagged.targets
                return arguments and f"{head} {self._rules.exact(name)} {arguments}"
            tail = self._expanded(tail, name)
            if form.kind == "literal":
                literal = LiteralArguments(form, self._rules, schema, prefix)
                arguments = literal.rule()
                self.targets += literal.targets
                close = self._rules.exact(form.close)
                mid = self._expanded(form.mid, name)
                return arguments and f"{head} {self._rules.exact(name)} {mid} {arguments} {close} {tail}"
            shape = self._shape() if form.kind == "object" else f"{{NAME}}{form.mid}{{ARGUMENTS}}"
            written = json.dumps(name, ensure_ascii=False)[1:-1] if form.kind == "object" else name
            arguments = self._json(schema, prefix)
            return arguments and f"{head} {self._expanded(shape, written, arguments)} {tail}"
        except RequestError as error:
            raise RequestError(f"{error} (of the tool {name!r:.80})") from None

    def _shape(self) -> str:
        """Return a call's object with {NAME}, {ID} and {ARGUMENTS} in it."""
        form = self._form
        if form.shape:
            return shape_with_places(form)
        if not form.name_path:
            return '{"{NAME}": {ARGUMENTS}}'
        written: dict[str, object] = {}
        for path, value in ((form.name_path, "{NAME}"), (form.arguments_path, "{ARGUMENTS}"), (form.id_path, "{ID}")):
            inner: Any = written
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            if path:
                inner[path[-1]] = value
        return json.dumps(written, ensure_ascii=False).replace('"{ARGUMENTS}"', "{ARGUMENTS}")

    def _json(self, schema: Schema, prefix: str) -> str | None:
        """Return a rule for the JSON texts of a schema; None if there are none."""
        lark = FiniteSchema(schema, JSON_OPTIONS, self._rules.name_by_definition, prefix)
        if not lark.is_needed:
            return self._rules.rule("%json " + json.dumps(schema | {"x-guidance": JSON_OPTIONS}, ensure_ascii=False))
        rule = lark.exact_rule() if self._is_exact else None
        if rule is None:
            narrowed = lark.narrowed() | {"x-guidance": JSON_OPTIONS}
            return self._rules.rule("%json " + json.dumps(narrowed, ensure_ascii=False))
        self.targets += lark.targets
        return rule

    def _expanded(self, text: str, name: str = "", arguments: str = "") -> str:
        """Return an expression for a joint, or a shape, with the values of its places."""
        pieces = PLACE.split(text)
        found = list[str]()
        for i, piece in enumerate(pieces):
            if i % 2 == 0:
                found.append(self._rules.exact(piece))
            elif piece == "NAME":
                found.append(self._rules.exact(name))
            elif piece == "ARGUMENTS":
                found.append(arguments)
            else:
                pattern = "/" + self._form.id_pattern.replace("/", r"\/") + "/" if piece == "ID" else _COUNT
                found.append(self._rules.terminal(pattern))
        return " ".join(filter(None, found))
