"""Read the arguments of calls that are written as in a programming language: a='x', b=[1, True], or a:<|"|>x<|"|>.

Python's and JSON's literals are both read. Texts may hold raw line breaks, and quotes that no comma and no bracket
follows. Values that JSON cannot represent, repeated keys, comments and expressions are none.
"""

from __future__ import annotations

import ast
import json
import re

import msgspec

from ..answer_forms.form import CallForm
from .joints import JointFinder, compile_joints
from .parts import is_object

_QUOTES = ('"""', "'''", '"', "'")
_DEPTHS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_SPACE = re.compile(r"\s*+")
_BARE = re.compile(r"[\w.+-]++")
_BEHIND = r"\s*+(?:[,:)\]}]|\Z)"  # stands behind each text; a quote before other text belongs to the text
_STRING = re.compile(
    r"""(?:"{3}((?:[^\\"]|\\.|"(?!""))*+)"{3}|'{3}((?:[^\\']|\\.|'(?!''))*+)'{3}"""
    rf"""|"((?:[^\\"]|\\.|"(?!{_BEHIND}))*+)"|'((?:[^\\']|\\.|'(?!{_BEHIND}))*+)')""",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([0-7]{1,3})|([\n\\'\"/abfnrtv]))", re.DOTALL
)
_ESCAPED = {**dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)), "\n": ""}
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class LiteralScanner:
    """Scanner for the bracket that closes a call's arguments. `is_over`: it was found."""

    def __init__(self, quote: str) -> None:
        """`quote`: the text around texts; "" or one character: as in Python."""
        self._quotes: tuple[str, ...] = _QUOTES
        if len(quote) > 1:
            self._quotes = (quote,)
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
        if self._quotes is not _QUOTES:
            return (quote,)
        if len(quote) > 1:
            return (quote, "\\")
        return (*(f"{quote} {sign}" for sign in ",:)]}"), "\\")


def read_arguments(text: str, form: CallForm) -> str | None:
    """Return arguments, written without the brackets around them, as the JSON text of an object; None if they are not
    in the form or have no form in JSON."""
    reader = _LiteralReader(text, form.quote)
    try:
        written = json.dumps(reader.arguments(form.assign or "="), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if not is_object(written):
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
    reader = _LiteralReader(text, "")
    try:
        return json.dumps(reader.whole(), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


class _LiteralReader:
    """Reader of values from a text. ValueError where it has another form."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._at = 0
        self._quote = quote * (len(quote) > 1)

    def whole(self) -> object:
        value = self._value()
        if self._peek():
            raise ValueError(self._text[self._at :])
        return value

    def arguments(self, assign: str) -> dict[str, object]:
        read: dict[str, object] = {}
        while self._peek():
            self._member(read, assign.strip())
            if self._peek() and not self._takes(","):
                raise ValueError("no comma")
        return read

    def _member(self, read: dict[str, object], assign: str) -> None:
        key = self._string() or self._bare()
        if key in read or not self._takes(assign):
            raise ValueError(key)
        read[key] = self._value()

    def _value(self) -> object:
        opening = self._peek()
        if self._is_string():
            return self._string()
        if opening not in _CLOSING:
            word = self._bare()
            if word in _WORDS:
                return _WORDS[word]
            value = ast.literal_eval(word)
            if not isinstance(value, int | float):
                raise ValueError(word)
            return value
        self._at += 1
        if opening == "{":
            return self._object()
        values: list[object] = []
        has_comma = False
        while not self._takes(_CLOSING[opening]):
            if values and not has_comma:
                raise ValueError("no comma")
            values.append(self._value())
            has_comma = self._takes(",")
        if opening == "(" and len(values) == 1 and not has_comma:
            return values[0]
        return values

    def _object(self) -> dict[str, object]:
        read: dict[str, object] = {}
        has_comma = True
        while not self._takes("}"):
            if not has_comma:
                raise ValueError("no comma")
            self._member(read, ":")
            has_comma = self._takes(",")
        return read

    def _peek(self) -> str:
        """Return the next character that is no white space; "" at the end."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
        return self._text[self._at : self._at + 1]

    def _takes(self, text: str) -> bool:
        self._peek()
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) * is_there
        return is_there

    def _bare(self) -> str:
        found = _BARE.match(self._text, self._at)
        if found is None:
            raise ValueError(self._text[self._at : self._at + 1])
        self._at = found.end()
        return found[0]

    def _is_string(self) -> bool:
        self._peek()
        if self._quote:
            return self._text.startswith(self._quote, self._at)
        return self._text.startswith(("'", '"'), self._at)

    def _string(self) -> str:
        """Return a text; texts behind one another are one."""
        read: list[str] = []
        while self._is_string():
            if self._quote:
                begin = self._at + len(self._quote)
                end = self._text.index(self._quote, begin)
                read.append(self._text[begin:end])
                self._at = end + len(self._quote)
                continue
            found = _STRING.match(self._text, self._at)
            if found is None:
                raise ValueError("a text without an end")
            self._at = found.end()
            read.append(_ESCAPE.sub(_character, found[found.lastindex or 1]))
        return "".join(read).encode("utf-16", "surrogatepass").decode("utf-16")


def _character(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code:
        return chr(int(code, 16))
    if escape[4]:
        return chr(int(escape[4], 8))
    return _ESCAPED.get(escape[5], escape[5])
