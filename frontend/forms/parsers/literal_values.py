"""LiteralReader: reads values that are written as Python or JSON writes them, without running anything.

Sets and tuples become lists, 007 is 7, and texts behind one another are one. Values that JSON cannot represent,
repeated keys, comments and expressions are none.
"""

from __future__ import annotations

import re
from functools import lru_cache

_SPACE = re.compile(r"\s*+")
_BARE = re.compile(r"[\w.+-]++")
_INTEGER = re.compile(r"[+-]?[0-9](?:_?[0-9])*+")
_BASED = re.compile(r"[+-]?0(?:[xX](?:_?[0-9a-fA-F])++|[oO](?:_?[0-7])++|[bB](?:_?[01])++)")
_FLOAT = re.compile(r"[+-]?(?:[0-9][0-9_]*+\.?[0-9_]*+|\.[0-9][0-9_]*+)(?:[eE][+-]?[0-9][0-9_]*+)?")
_BEHIND = r"\s*+(?:[,:)\]}]|\Z)"  # stands behind each text in a list or an object that has quotes in it
_ESCAPE = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([0-7]{1,3})|([\n\\'\"/abfnrtv]))", re.DOTALL
)
_ESCAPED = {**dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)), "\n": ""}
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


@lru_cache(maxsize=64)
def ending_before(behind: str) -> re.Pattern[str]:
    """Return an expression for a text with its quotes, and quotes in it that `behind`, an expression, does not
    follow."""
    return strings(f"(?!{behind})")


def strings(inner: str) -> re.Pattern[str]:
    """Return an expression for a text with its quotes. inner: what follows a quote that belongs to the text."""
    return re.compile(
        r"""([rRuU]?+)(?:"{3}((?:[^\\"]|\\.|"(?!""))*+)"{3}|'{3}((?:[^\\']|\\.|'(?!''))*+)'{3}"""
        rf"""|"((?:[^\\"]|\\.|"{inner})*+)"|'((?:[^\\']|\\.|'{inner})*+)')""",
        re.DOTALL,
    )


EXACT = strings("(?!)")
LOOSE = ending_before(_BEHIND)


class LiteralReader:
    """Reader of values from a text. ValueError where it has another form."""

    def __init__(self, text: str, quote: str, texts: re.Pattern[str]) -> None:
        """quote: of several characters, around texts beside those of Python; "" for none. texts: an expression for a
        text, of those that are no part of a list or an object."""
        self._text = text
        self._at = 0
        self._quote = quote
        self._pattern = texts

    def whole(self) -> object:
        """Read the text as one value."""
        value = self._value()
        if self._peek():
            raise ValueError(self._text[self._at :])
        return value

    def arguments(self, assign: str) -> dict[str, object]:
        """Read the text as keys and values with `assign` between them."""
        read: dict[str, object] = {}
        while self._peek():
            self._member(read, assign.strip())
            if self._peek() and not self._takes(","):
                raise ValueError("no comma")
        return read

    def _member(self, read: dict[str, object], assign: str) -> None:
        key = self._key()
        if key in read or not self._takes(assign):
            raise ValueError(key)
        read[key] = "" if self._is_left_out() else self._value()

    def _is_left_out(self) -> bool:
        """Return whether no value stands here. Where marks stand around texts, that is a text of nothing."""
        return bool(self._quote) and self._peek() in ("", ",", "}")

    def _key(self) -> str:
        text = self._string()
        if text is None:
            return self._bare()
        return text

    def _value(self) -> object:
        text = self._string()
        if text is not None:
            return text
        opening = self._peek()
        if opening not in _CLOSING:
            word = self._bare()
            if word in _WORDS:
                return _WORDS[word]
            return _number(word)
        self._at += 1
        outer = self._pattern
        if outer is not EXACT:
            self._pattern = LOOSE
        value = self._inside(opening)
        self._pattern = outer
        return value

    def _inside(self, opening: str) -> object:
        """Read a list, an object, a set or a tuple behind its opening bracket."""
        if opening == "{" and not self._begins_set():
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

    def _begins_set(self) -> bool:
        """Return whether values without keys stand behind a brace."""
        if self._peek() == "}":
            return False
        begin = self._at
        try:
            self._key()
            is_set = not self._takes(":")
        except ValueError:
            is_set = True
        self._at = begin
        return is_set

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
        self._peek()
        found = _BARE.match(self._text, self._at)
        if found is None:
            raise ValueError(self._text[self._at : self._at + 1])
        self._at = found.end()
        return found[0]

    def _string(self) -> str | None:
        """Return a text, of all that stand behind one another; None if none is there."""
        read: list[str] = []
        while (text := self._one_string(is_first=not read)) is not None:
            read.append(text)
        if not read:
            return None
        return "".join(read).encode("utf-16", "surrogatepass").decode("utf-16")

    def _one_string(self, *, is_first: bool) -> str | None:
        opening = self._peek()
        if self._quote and self._text.startswith(self._quote, self._at):
            begin = self._at + len(self._quote)
            end = self._text.index(self._quote, begin)
            self._at = end + len(self._quote)
            return self._text[begin:end]
        found = self._pattern.match(self._text, self._at)
        if found is None or not (is_first or opening in "'\""):
            if opening in ("'", '"'):
                raise ValueError("a text without an end")
            return None
        self._at = found.end()
        text = found[found.lastindex or 1]
        if found[1] in ("r", "R"):
            return text
        return _ESCAPE.sub(_character, text)


def _number(word: str) -> int | float:
    """Return the number that a word is; ValueError if it is none."""
    if _INTEGER.fullmatch(word):
        return int(word)
    if _BASED.fullmatch(word):
        return int(word, 0)
    if _FLOAT.fullmatch(word):
        return float(word)
    raise ValueError(word)


def _character(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code:
        return chr(int(code, 16))
    if escape[4]:
        return chr(int(escape[4], 8))
    return _ESCAPED.get(escape[5], escape[5])
