"""Read the arguments of calls that are written as in a programming language: a='x', b=[1, True], or a:<|"|>x<|"|>.

Python's and JSON's literals are both read (literal_values.py). Texts may hold raw line breaks and, where Python would
find no text, quotes: the text of an argument ends where the next argument or the call's end follows, and one in a list
or an object where a comma or a bracket does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

import msgspec

from ....ipc.params.call_form import markers_of
from ..answer_forms.form import CallForm
from .joint_automaton import compile_joints
from .joints import JointFinder
from .literal_values import EXACT, LOOSE, LiteralReader, ending_before
from .parts import is_object

_QUOTES = ('"""', "'''", '"', "'")
BEHIND_ARGUMENT = r"\s*+(?:,\s*+[\w.+-]*+\s*+{}|,?\s*+\Z)"  # with what stands behind a key
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
        self._behind = _behind_arguments(form)
        self._inside: JointFinder | None = None
        self._quote = ""  # of the open text
        self._since: list[str] = []  # all text behind that quote
        self._is_loose = False  # any text ends where a comma or a bracket follows
        self._is_escaped = False
        self._depth = 1
        self.is_over = False

    def append(self, text: str, *, is_last: bool = False) -> str:
        """Scan the next text. Return the text behind the closing bracket; "" before it was found.

        If a text has no end in the answer, it is scanned again for one before any comma or bracket: the call's end may
        be missing."""
        if self._inside is not None:
            self._since.append(text)
        rest = self._scan(text, is_last=is_last)
        if is_last and not self.is_over and self._inside is not None and not self._is_loose:
            self._is_loose = True
            self._is_escaped = False
            self._inside = JointFinder(compile_joints(self._ends(self._quote)))
            return self._scan("".join(self._since), is_last=True)
        return rest

    def _scan(self, text: str, *, is_last: bool) -> str:
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
                    self._since = [text]
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
        behind = tuple(",:)]}")
        if self._depth == 1 and not self._is_loose:
            behind = self._behind
        return (*(f"{quote} {each}" for each in behind), "\\")


def _behind_arguments(form: CallForm) -> tuple[str, ...]:
    """Return the joints of which one stands behind an argument: a key, or the call's closing bracket and what may
    follow that, the end of all calls or another call."""
    close = form.close.strip()
    key = f"{{KEY}} {(form.assign or '=').strip()}"
    call = f"{form.next.strip()} {{NAME}} {form.mid.strip()}"
    behind_call = (*markers_of(form.end), f"{call} {key}", f"{call} {close}")
    return (f", {key}", *(f"{end} {each}" for end in (close, f", {close}") for each in behind_call))


def read_arguments(text: str, form: CallForm) -> str | None:
    """Return arguments, written without the brackets around them, as the JSON text of an object; None if they are not
    in the form or have no form in JSON."""
    assign = form.assign or "="
    strings = (EXACT, ending_before(BEHIND_ARGUMENT.format(re.escape(assign.strip()))), LOOSE)
    written = _read(text, form.quote, lambda reader: reader.arguments(assign), strings)
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
    return _read(text, "", LiteralReader.whole, (EXACT, LOOSE))


def _read(
    text: str, quote: str, read: Callable[[LiteralReader], object], strings: Iterable[re.Pattern[str]]
) -> str | None:
    """Return what is read from a text as JSON, by the first of the expressions for texts in it with which it is read;
    None if it is read with none."""
    for each in strings:
        try:
            value = read(LiteralReader(text, quote * (len(quote) > 1), each))
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            continue
    return None
