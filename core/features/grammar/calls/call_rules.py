"""CallRules: translates a constraint on calls in a model's own form to a grammar of the library.

The joints of the form are written as the chat template renders them. Text before calls and thoughts hold no first
marker of a call, so that a call always begins where a reader finds one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

from .....ipc.errors import RequestError
from .....ipc.params.calls_constraint import CallsConstraint
from ..schemas.finite_schema import FiniteSchema
from ..schemas.json_schema import adapted
from ..schemas.schema import Schema
from .arguments import any_of
from .lark_rules import PLACE, Closing, LarkRules, quoted, without
from .literal import LiteralArguments
from .noted_schema import JSON_OPTIONS
from .object_shape import shape_with_places
from .tagged import TaggedArguments

_COUNT = "/[0-9]{1,4}/"
_SPACE = r"/[ \n]{1,4}/"  # behind a thought, in the answer or in the prompt
_ANY_OBJECT: Schema = {"type": "object"}


class CallRules:
    """Translator of one constraint. `is_exact`: numbers that the library would round become rules; otherwise bounds are
    moved inwards."""

    def __init__(self, constraint: CallsConstraint, rules: LarkRules, *, is_exact: bool = True) -> None:
        self._constraint, self._form, self._rules = constraint, constraint.form, rules
        self._is_exact = is_exact
        self._targets = list[str]()
        self._numbers = count()
        before, found, behind = self._form.start.partition("{NAME}")
        self._start, self._head = before, found + behind  # a head stands before the name of each call
        before, found, behind = self._form.next.partition("{NAME}") if found else (self._form.next, "", "")
        self._next, self._further_head = before, found + behind
        self._marker = rules.split(self._start)[0].marker

    def text(self) -> str:
        """Return the grammar in Lark. RequestError, with the tool's name, for a schema that cannot be served."""
        calls = self._calls()
        if self._constraint.has_text:
            return self._rules.text(self._with_text(calls), self._targets)
        space = self._rules.terminal(_SPACE)
        return self._rules.text(f"{self._thought()} {space}? {self._expanded(self._start)} {calls}", self._targets)

    def _calls(self) -> str:
        """Return an expression for the calls behind the first start."""
        lasts = self._each_call(self._head, self._form.end, self._form.empty_end)
        if self._constraint.has_one_call or not self._form.next.strip():
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
        form, prefix = self._form, f"c{next(self._numbers)}"
        try:
            schema = adapted(_ANY_OBJECT | (self._constraint.tools[name] or {}))
            head = self._expanded(head, name)
            if form.kind == "tagged":
                tails = (tail.replace("{NAME}", name), (empty_tail or tail).replace("{NAME}", name))
                expanded = partial(self._expanded, name=name)
                tagged = TaggedArguments(form, self._rules, schema, prefix, tails, expanded)
                arguments = tagged.rule(schema)
                self._targets += tagged.targets
                return arguments and f"{head} {self._rules.exact(name)} {arguments}"
            tail = self._expanded(tail, name)
            if form.kind == "literal":
                literal = LiteralArguments(form, self._rules, schema, prefix)
                arguments = literal.rule()
                self._targets += literal.targets
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
        self._targets += lark.targets
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

    def _thought(self) -> str:
        """Return an expression for a thought that may come first; "" without thoughts."""
        if self._constraint.thought is None:
            return ""
        opening, closing = (each.strip() for each in self._constraint.thought)
        close, rest = self._rules.split(closing)
        body = self._rules.closed(without([close.marker, self._marker]), Closing("", close.marker))
        return f"({self._rules.exact(opening)} {body} {self._rules.exact(rest)})?"

    def _with_text(self, calls: str) -> str:
        """Return an expression for any text, behind which calls may stand."""
        if not self._marker:
            return f"({self._expanded(self._start)} {calls} | {self._rules.terminal(self._other_text())})"
        text = without([self._marker])
        rest = self._expanded(self._start.lstrip()[len(self._marker) :])
        specials = self._rules.specials_except(self._marker)
        others = f"({self._rules.terminal(text)}? {specials})*" if specials else ""
        begun = self._rules.closed(text, Closing("", self._marker))
        return f"{others} ({self._rules.terminal(text)}? | {begun} {rest} {calls})"

    def _other_text(self) -> str:
        """Return a terminal for text that does not begin as a call of a form without a start."""
        return f"/(?s:.*)/ & ~(/\\s*/ ({' | '.join(map(quoted, self._begins()))}) /(?s:.*)/)"

    def _begins(self) -> Iterator[str]:
        for name in self._constraint.tools:
            begin = self._shape().split("{NAME}")[0] if self._form.kind == "object" else name
            yield begin.strip()[:1] if self._form.kind == "object" else name
