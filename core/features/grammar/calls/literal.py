"""LiteralArguments: rules for arguments as in a programming language, `a='x', b=[1, True]` or `a:<|"|>x<|"|>,b:[1]`."""

from __future__ import annotations

from .....ipc.params.call_form import CallForm
from ..schemas.schema import Schema
from .arguments import Pair, any_of, flat_objects, pairs_of
from .counted_pairs import counted_list, counts_of
from .lark_rules import LarkRules
from .notation import literal_notation
from .noted_schema import NotedSchema


class LiteralArguments(NotedSchema):
    """Writer of the rules of one tool's arguments, without brackets around them."""

    def __init__(self, form: CallForm, rules: LarkRules, schema: Schema, prefix: str) -> None:
        super().__init__(schema, literal_notation(form, rules), prefix)
        self._rules_of_call, self._assign = rules, rules.exact(form.assign)

    def rule(self) -> str | None:
        """Return an expression for the arguments; None if none conform."""
        return any_of(map(self._pairs, flat_objects(self._alternatives, self._root)))

    def _pairs(self, schema: Schema) -> str | None:
        named: list[tuple[str, bool]] = []
        others = ""
        for pair in pairs_of(schema, self._rules_of_call):
            own = self._pair(pair)
            if own is None and pair.is_required:
                return None
            if own is not None and pair.name:
                named.append((own, pair.is_required))
            elif own is not None:
                others = own
        return counted_list(named, others, counts_of(schema), self._comma, self._rule)

    def _pair(self, pair: Pair) -> str | None:
        """Return an expression for an argument; None if no value conforms."""
        values = ((key, self.rule_of(schema)) for key, schema in pair.choices)
        ways = (self._rule(f"{key} {self._assign} {value}") for key, value in values if value is not None)
        return any_of(ways)
