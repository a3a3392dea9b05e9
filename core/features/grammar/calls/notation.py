"""Notations of values in calls: how texts, keys and words are written where a model does not write plain JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..schemas.schema import Schema
from .lark_rules import LarkRules, first_held, quoted, without
from .text_terminal import conditions

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
OTHER_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"  # of keys that no schema names


@dataclass(frozen=True, eq=False)
class Notation:
    """How values are written. quote: the text around texts; of one character, with escapes behind backslashes between
    them, otherwise without any. forbidden: markers that no text of a value may hold. bare_keys: keys of objects have no
    quotes. words: those for null, false and true."""

    rules: LarkRules
    quote: str
    forbidden: tuple[str, ...] = ()
    bare_keys: bool = False
    words: tuple[tuple[str, ...], ...] = (("null",), ("false",), ("true",))
    comma: str = "/, ?/"
    colon: str = "/: ?/"

    def text(self, schema: Schema) -> str:
        """Return an expression for the texts of a string schema."""
        is_found = not schema.keys().isdisjoint(("pattern", "format"))  # in a text without escapes
        if len(self.quote) != 1:
            body = [without([self.quote, *self.forbidden]), *conditions(schema)]
        elif is_found:
            body = [f"/{self._characters(has_escapes=False)}*/", *conditions(schema)]
        else:
            low, high = schema.get("minLength", 0), schema.get("maxLength", "")
            body = [f"/{self._characters(has_escapes=True)}{{{low},{high}}}/"]
        return self._between(" & ".join([*body, *([without(self.forbidden)] if self.forbidden else [])]))

    def constant(self, value: object) -> str:
        """Return an expression for one value."""
        if value is None or isinstance(value, bool):
            return self.word(value)
        if isinstance(value, str):
            return self._exact(value)
        if isinstance(value, list):
            return " ".join(['"["', f" {self.comma} ".join(map(self.constant, value)), '"]"'])
        if isinstance(value, dict):
            pairs = (f"{self.key(name)} {self.colon} {self.constant(each)}" for name, each in value.items())
            return " ".join(['"{"', f" {self.comma} ".join(pairs), '"}"'])
        return quoted(json.dumps(value))

    def word(self, value: bool | None) -> str:
        words = self.words[0 if value is None else 1 + value]
        return self.rules.rule(" | ".join(map(quoted, words)), "W")

    def key(self, name: str) -> str:
        """Return an expression for a key of an object in a value."""
        return quoted(name) if self.bare_keys and _NAME.fullmatch(name) else self._exact(name)

    def other_key(self, taken: Iterable[str], schema: Schema | None = None) -> str:
        """Return an expression for any key that conforms to a string schema and is none of `taken`."""
        others = " | ".join(map(quoted, taken))
        body = " & ".join([OTHER_NAME, *conditions(schema or {}), *([f"~({others})"] if others else [])])
        return self.rules.terminal(body) if self.bare_keys else self._between(body)

    def _exact(self, text: str) -> str:
        if len(self.quote) != 1:
            return self.rules.exact(self.quote + text + self.quote)
        pieces = list[str]()
        while (found := first_held(text, self.forbidden)) is not None:
            place = found.start()
            pieces += _with_escapes(text[:place], self.quote), f"\\u{ord(text[place]):04x}"
            text = text[place + 1 :]
        return quoted("".join([self.quote, *pieces, _with_escapes(text, self.quote), self.quote]))

    def _between(self, body: str) -> str:
        """Return an expression for a terminal between two quotes."""
        if len(self.quote) != 1:
            closing, rest = self.rules.split(self.quote)
            closed = self.rules.closed(body, closing)
            return f"{self.rules.exact(self.quote)} {closed} {self.rules.exact(rest)}".rstrip()
        quote = quoted(self.quote)
        return self.rules.terminal(f"{quote} ({body}) {quote}")

    def _characters(self, *, has_escapes: bool) -> str:
        plain = rf"[^\\{self.quote}\x00-\x1f\x7f]"
        return rf"(?:{plain}|\\[\\{self.quote}nrt]|\\u00[01][0-9a-f])" if has_escapes else plain


def _with_escapes(text: str, quote: str) -> str:
    """Return a text as it stands between quotes."""
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    return inner if quote == '"' else inner.replace('\\"', '"').replace(quote, "\\" + quote)
