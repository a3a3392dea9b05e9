"""Notations of values in calls: how texts, keys and words are written where a model does not write plain JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .....ipc.params.call_form import CallForm, Spelling
from ..schemas.object_keys import OtherKeys
from ..schemas.schema import Schema
from .lark_rules import LarkRules, first_held, quoted, without
from .text_terminal import conditions

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OTHER_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"  # of keys that no schema names
_JSON_WORDS, _PYTHON_WORDS = ("null", "false", "true"), ("None", "False", "True")
# behind a backslash: a sign with which it is an escape to readers, so that others stand for themselves
_ESCAPING = r"""uUxN0-7\\'"\/abfnrtv\x00-\x1f\x7f"""
_INSIDE = (
    rf""" ?(?:[^\s,:)\]}}'"\\\x00-\x1f\x7f]|\\[^{_ESCAPING}])"""  # behind a quote that does not end its text to readers
)
_SPLITTING = re.compile(r"\\|[\x00-\x08\x0b-\x1f\x7f]")  # not in texts without escapes


@dataclass(frozen=True, eq=False)
class Notation:
    """How values are written. quotes: texts around a text, in the order of preference; of one character, with escapes
    behind backslashes between them, otherwise without any. is_raw: between two quotes of one character, line breaks
    and quotes may also stand as they are. forbidden: markers that no text of a value may hold. bare_keys: keys of
    objects have no quotes. words: those for null, false and true. lists, objects: notations of the values that are
    lists and objects; None: this one."""

    rules: LarkRules
    quotes: tuple[str, ...]
    is_raw: bool = False
    forbidden: tuple[str, ...] = ()
    bare_keys: bool = False
    words: tuple[tuple[str, ...], ...] = tuple(zip(_JSON_WORDS))
    comma: str = "/, ?/"
    colon: str = "/: ?/"
    lists: Notation | None = None
    objects: Notation | None = None

    def text(self, schema: Schema) -> str:
        """Return an expression for the texts of a string schema."""
        return _any_of(self._texts(quote, schema) for quote in self.quotes)

    def constant(self, value: object) -> str:
        """Return an expression for one value."""
        if value is None or isinstance(value, bool):
            return self.word(value)
        if isinstance(value, str):
            return self._exact(value)
        if isinstance(value, list):
            inner = self.lists or self
            return " ".join(['"["', f" {inner.comma} ".join(map(inner.constant, value)), '"]"'])
        if isinstance(value, dict):
            inner = self.objects or self
            pairs = (f"{inner.key(name)} {inner.colon} {inner.constant(each)}" for name, each in value.items())
            return " ".join(['"{"', f" {inner.comma} ".join(pairs), '"}"'])
        return quoted(json.dumps(value))

    def word(self, value: bool | None) -> str:
        words = self.words[0 if value is None else 1 + value]
        return self.rules.rule(" | ".join(map(quoted, words)), "W")

    def key(self, name: str) -> str:
        """Return an expression for a key of an object in a value."""
        return quoted(name) if self.bare_keys and _NAME.fullmatch(name) else self._exact(name)

    def other_key(self, taken: Iterable[str], keys: OtherKeys) -> str:
        """Return an expression for any of `keys` but those that are `taken`."""
        body = other_name(taken, keys)
        if self.bare_keys:
            return self.rules.terminal(body)
        return _any_of(self._between(quote, body) for quote in self.quotes)

    def _texts(self, quote: str, schema: Schema) -> str:
        is_found = not schema.keys().isdisjoint(("pattern", "format"))  # in a text without escapes
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if len(quote) != 1:
            body = [without([quote, *self.forbidden]), *conditions(schema)]
        elif is_found:
            body = [f"/{_plain(quote)}*/", *conditions(schema)]
        elif self.is_raw:
            body = _raw_texts(quote, low, high)
        else:
            body = [f"/(?:{_plain(quote)}|{_escape(quote)}){{{low},{high}}}/"]
        return self._between(quote, " & ".join([*body, *([without(self.forbidden)] if self.forbidden else [])]))

    def _exact(self, text: str) -> str:
        spellings = [each for quote in self.quotes for each in self._spellings(quote, text)]
        return _any_of(dict.fromkeys(spellings))

    def _spellings(self, quote: str, text: str) -> Iterator[str]:
        if len(quote) != 1:
            yield self.rules.exact(quote + text + quote)
            return
        pieces, rest = list[str](), text
        while (found := first_held(rest, self.forbidden)) is not None:
            place = found.start()
            pieces += _with_escapes(rest[:place], quote), f"\\u{ord(rest[place]):04x}"
            rest = rest[place + 1 :]
        yield quoted("".join([quote, *pieces, _with_escapes(rest, quote), quote]))
        if self.is_raw and not _SPLITTING.search(text) and re.search(rf"{quote}(?!{_INSIDE})", text) is None:
            yield quoted(quote + text + quote)

    def _between(self, quote: str, body: str) -> str:
        """Return an expression for a terminal between two quotes."""
        if len(quote) != 1:
            closing, rest = self.rules.split(quote)
            closed = self.rules.closed(body, closing)
            return f"{self.rules.exact(quote)} {closed} {self.rules.exact(rest)}".rstrip()
        mark = quoted(quote)
        return self.rules.terminal(f"{mark} ({body}) {mark}")


def other_name(taken: Iterable[str], keys: OtherKeys) -> str:
    """Return a terminal for any of `keys` but those that are `taken`, as it stands without quotes."""
    others = " | ".join(map(quoted, taken))
    return " & ".join([_OTHER_NAME, *keys.conditions(), *([f"~({others})"] if others else [])])


def json_notation(rules: LarkRules, forbidden: tuple[str, ...] = ()) -> Notation:
    """Return the notation of JSON. forbidden: see Notation."""
    return Notation(rules, ('"',), forbidden=forbidden)


def literal_notation(form: CallForm, rules: LarkRules) -> Notation:
    """Return the notation of the arguments of a form of the kind literal."""
    others = {"json": json_notation(rules), "python": Notation(rules, ("'", '"'), words=tuple(zip(_PYTHON_WORDS)))}

    def inner(spelling: Spelling) -> Notation | None:
        return others.get(spelling)

    quote = form.quote or '"'
    is_marked = len(quote) > 1
    written = inner(form.texts)
    return Notation(
        rules,
        (quote,) if written is None else written.quotes,
        is_raw=written is None and not is_marked,
        bare_keys=form.has_bare_keys,
        words=tuple(zip(form.words)) or tuple(zip(_JSON_WORDS, _PYTHON_WORDS, strict=True)),
        comma=rules.exact(form.pair) if is_marked and form.pair.strip() == "," else "/, ?/",
        colon=rules.exact(form.assign) if is_marked else "/: ?/",
        lists=inner(form.lists),
        objects=inner(form.objects),
    )


def _any_of(expressions: Iterable[str]) -> str:
    found = list(expressions)
    return found[0] if len(found) == 1 else f"({' | '.join(found)})"


def _plain(quote: str) -> str:
    return rf"[^\\{quote}\x00-\x1f\x7f]"


def _escape(quote: str) -> str:
    return rf"\\[\\{quote}nrt]|\\u00[01][0-9a-f]"


def _raw_texts(quote: str, low: int, high: int | str) -> list[str]:
    """Return terminals that texts between two `quote` must match, in which line breaks, and quotes before further
    text, may stand as they are. Where nothing is counted, backslashes that begin no escape stand for themselves."""
    plain = rf"[^\\{quote}\x00-\x08\x0b-\x1f\x7f]"
    if not low and high == "":
        return [rf"/(?:{plain}|{quote}{_INSIDE}|{_escape(quote)}|\\[^{_ESCAPING}])*/"]
    counted = rf"/(?:{plain}|{quote}|{_escape(quote)}){{{low},{high}}}/"
    return [counted, rf"/(?:[^\\{quote}]|{quote}{_INSIDE}|\\(?s:.))*/"]


def _with_escapes(text: str, quote: str) -> str:
    """Return a text as it stands between quotes."""
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    return inner if quote == '"' else inner.replace('\\"', '"').replace(quote, "\\" + quote)
