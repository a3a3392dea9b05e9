"""Read the arguments of calls that are written as in a programming language: a='x', b=[1, True], or a:<|"|>x<|"|>.

Python's and JSON's literals are both read (literal_values.py). Texts may hold raw line breaks and, where Python would
find no text, quotes that no comma and no bracket follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec

from ..answer_forms.form import CallForm
from .joints import JointFinder, compile_joints
from .literal_values import LiteralReader
from .parts import is_object

_QUOTES = ('"""', "'''", '"', "'")
_DEPTHS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class LiteralScanner:
    """Scanner for the bracket that closes a call's arguments. `is_over`: it was found."""

    def __init__(self, form: CallForm) -> None:
        self._marks: tuple[str, ...] = ()  # quotes of several characters, which stand for no others
        self._quotes: tuple[str, ...] = _QUOTES
        if len(form.quote) > 1:
            self._marks = (form.quote,)
            has_others = {form.texts, form.lists, form.objects} != {"own"}
            self._quotes = self._marks + _QUOTES * has_others
        self._outside = JointFinder(compile_joints((*self._quotes, *_DEPTHS)))
        self._inside: JointFinder | None = None
        self._quote = ""  # of the open text
        self._is_escaped = False
        self._depth = 1
        self.is_over = False

    def append(self, text: str, *, is_last: bool = False) -> str:
        """Scan the next text. Return the text behind the closing bracket; "" before it was found."""
        while text:
            if self._is_escaped:
                self._is_escaped = False
                text = text[1:]
            elif self._inside is not None:
                _, found, text = self._inside.feed(text, is_last=is_last)
                if found is not None and found.text == "\\":
                    self._is_escaped = True
                elif found is not None:
                    self._inside = None
                    text = found.text[len(self._quote) :] + text
            else:
                _, found, text = self._outside.feed(text, is_last=is_last)
                if found is not None and found.text in self._quotes:
                    self._quote = found.text
                    self._inside = JointFinder(compile_joints(self._ends(found.text)))
                elif found is not None:
                    self._depth += _DEPTHS[found.text]
                    self.is_over = self._depth == 0
            if self.is_over:
                break
        return text

    def _ends(self, quote: str) -> tuple[str, ...]:
        """Return the joints that are looked for in a text."""
        if quote in self._marks:
            return (quote,)
        if len(quote) > 1:
            return (quote, "\\")
        return (*(f"{quote} {sign}" for sign in ",:)]}"), "\\")


def read_arguments(text: str, form: CallForm) -> str | None:
    """Return arguments, written without the brackets around them, as the JSON text of an object; None if they are not
    in the form or have no form in JSON."""
    written = _read(text, form.quote, lambda reader: reader.arguments(form.assign or "="))
    if written is None or not is_object(written):
        return None
    return written


def read_json(text: str) -> str:
    """Return a value in JSON's or Python's form as JSON text; any other text as a text."""
    try:
        msgspec.json.decode(text)
        return text.strip()
    except (msgspec.DecodeError, RecursionError):
        return read_literal(text) or json.dumps(text, ensure_ascii=False)


def read_literal(text: str) -> str | None:
    """Return a value in Python's or JSON's form as JSON text; None if it is none."""
    return _read(text, "", LiteralReader.whole)


def _read(text: str, quote: str, read: Callable[[LiteralReader], object]) -> str | None:
    """Return what is read from a text as JSON: as Python reads it or else, with quotes in its texts; None if both
    fail."""
    for is_loose in (False, True):
        try:
            value = read(LiteralReader(text, quote * (len(quote) > 1), is_loose=is_loose))
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            continue
    return None
