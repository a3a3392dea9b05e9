"""The grammar of a thought that a model may open itself, before the text that a constraint is about."""

from __future__ import annotations

import json
from collections.abc import Iterable

from .lark_rules import Closing, LarkRules, without

_SPACE = r"/[ \n]{1,4}/"  # that templates write before a thought, and behind it


def space(rules: LarkRules) -> str:
    """Return an expression for the white space that templates write between a thought or text and calls, or none."""
    return f"{rules.terminal(_SPACE)}?"


def own_thought(rules: LarkRules, thought: tuple[str, str], markers: Iterable[str] = ()) -> str:
    """Return an expression for a thought. `thought`: the texts that open and close it; `markers`: it holds none of
    these."""
    opening, closing = (each.strip() for each in thought)
    close, rest = rules.split(closing)
    body = rules.closed(without([close.marker, *markers]), Closing("", close.marker))
    return f"{space(rules)} {rules.exact(opening)} {body} {rules.exact(rest)}"


def behind_own_thought(rules: LarkRules, thought: tuple[str, str], grammar: str) -> str:
    """Return the library's grammar of a text behind a thought or alone. `grammar`: the library's, of the text."""
    start = f"({own_thought(rules, thought)} {space(rules)})? @answer"
    answer = {"lark_grammar": grammar}
    if grammar.startswith("{"):
        (answer,) = json.loads(grammar)["grammars"]
    both = [{"name": "thought", "lark_grammar": rules.text(start)}, {**answer, "name": "answer"}]
    return json.dumps({"grammars": both}, ensure_ascii=False)
