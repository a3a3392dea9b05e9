"""Readers of tool calls in JSON, {"name": …, "arguments": {…}}, from text that arrives in pieces."""

from __future__ import annotations

import re

import msgspec

from .parts import Arguments, CallBegin, CallEnd, Part, call, content, is_object

MAX_HEAD = 1024  # most characters before the arguments of a call that is streamed
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OUTSIDE, _IN_TEXT = re.compile(r'["\[\]{}<]'), re.compile(r'["\\]')


class JsonScanner:
    """Scanner for the end of a JSON object or list. `is_over`: the end was found (then `is_whole` is True), or a <
    outside strings, which starts a marker."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_in_text = self._is_escaped = False
        self.is_over = self.is_whole = False

    def append(self, text: str) -> int:
        """Scan the next text and return the number of its characters that belong to the object or list."""
        position = int(self._is_escaped and bool(text))
        self._is_escaped = self._is_escaped and not text
        while (found := (_IN_TEXT if self._is_in_text else _OUTSIDE).search(text, position)) is not None:
            position, sign = found.end(), found[0]
            if sign == '"':
                self._is_in_text = not self._is_in_text
            elif self._is_in_text:
                self._is_escaped = position == len(text)
                position += 1
            elif sign == "<":
                self.is_over = True
                return position - 1
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    self.is_over = self.is_whole = True
                    return position
        return len(text)


class CallReader:
    """Reader of one call. Its parts are returned as they arrive if the object starts with name and arguments, in this
    order and within MAX_HEAD characters; otherwise all are returned at its end. With `has_name` the object holds only
    the arguments.

    Once it `is_over`, `rest` is the text after the call, or the whole text if `is_call` is False. A call ends after
    its arguments if its object does not continue as JSON."""

    def __init__(self, before: str = "", *, has_name: bool = False) -> None:
        """`before`: text before the object that is part of the raw call, such as its opening marker."""
        self.before = before
        self._head: list[str] = []
        self._begin_of_head = ""  # first characters of the head, which decide whether parts are returned early
        self._raw: list[str] = []
        self._whole = JsonScanner()
        self._arguments: JsonScanner | None = JsonScanner() if has_name else None
        self._has_tail = not has_name
        self._tail: list[str] = []  # text of the object after its arguments
        self._tail_end: JsonScanner | None = None  # set once the object continues after the arguments
        self.is_over = False
        self.is_call = has_name
        self.rest = ""

    def append(self, text: str) -> list[Part]:
        return self._continue(text) if self.is_call else self._begin(text)

    def finish(self) -> list[Part]:
        """Return the parts of an object that is incomplete at the end of the answer."""
        if self.is_over:
            return []
        return [self._end(), *content("".join(self._tail))] if self.is_call else content(self.before + self._held)

    @property
    def _held(self) -> str:
        return "".join(self._head)

    def _begin(self, text: str) -> list[Part]:
        self._head.append(text)
        if len(self._begin_of_head) < MAX_HEAD:
            self._begin_of_head += text[: MAX_HEAD - len(self._begin_of_head)]
            head = _HEAD.match(self._begin_of_head)
            if head is not None and (name := _text_of(head[1])) is not None:
                self.is_call, self._arguments = True, JsonScanner()
                self._raw.append(head[0])
                return [CallBegin(name), *self._continue(self._held[head.end() :])]
        if (begun := self._begin_of_head.lstrip()) and begun[0] != "{":
            self.is_over, self.rest = True, self._held
            return []
        end = self._whole.append(text)
        if not self._whole.is_over:
            return []
        self.is_over = True
        held = self._held
        end += len(held) - len(text)
        found = read_call(held[:end])
        if found is None:
            self.rest = held
            return []
        self.is_call, self.rest = True, held[end:]
        return call(*found, raw=self.before + held[:end])

    def _continue(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._arguments is not None:
            end = self._arguments.append(text)
            parts += [Arguments(text[:end])] if end else []
            self._raw.append(text[:end])
            text = text[end:]
            if not self._arguments.is_over:
                return parts
            self._arguments = None
        if self._has_tail:
            text = self._read_tail(text)
        else:
            self.is_over = True
        if self.is_over:
            self.rest = text
            parts.append(self._end())
        return parts

    def _read_tail(self, text: str) -> str:
        """Read the rest of the object after its arguments: white space, further fields and the closing bracket. Return
        the text after the object; if the rest has another form, the text after the arguments; "" while undecided."""
        if self._tail_end is None:
            begun = text.lstrip()
            if begun and begun[0] in "},":
                self._tail_end = JsonScanner(depth=1)
            elif begun:
                self.is_over = True
        end = 0 if self._tail_end is None else self._tail_end.append(text)
        self.is_over |= self._tail_end is not None and self._tail_end.is_over
        self._tail.append(text[:end] if self.is_over else text)
        if not self.is_over:
            return ""
        tail, rest = "".join(self._tail), text[end:]
        if self._tail_end is None or not self._tail_end.is_whole or not is_object(f'{{"": 0{tail}'):
            return tail + rest
        self._raw.append(tail)
        return rest

    def _end(self) -> CallEnd:
        return CallEnd(self.before + "".join(self._raw))


class CallListReader:
    """Reader of consecutive calls. Other text ends the list: then `is_over` is True, `rest` is that text, and `before`
    is the separators between the last call and that text; without any call, the `before` of the constructor with the
    separators after it."""

    def __init__(self, between: str, before: str = "") -> None:
        """`between`: the characters that may separate calls. `before`: text before the list that belongs to the raw
        text of the first call."""
        self._between = between
        self._call: CallReader | None = None
        self._has_calls = False
        self.before = before
        self.is_over = False
        self.rest = ""

    def append(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._call is None:
                begun = text.lstrip(self._between)
                self.before += text[: len(text) - len(begun)]
                if not begun:
                    break
                self._call, text = CallReader(self.before), begun
            parts += self._call.append(text)
            if not self._call.is_over:
                break
            text = self._call.rest
            if not self._call.is_call:
                self.is_over, self.rest = True, text
                break
            self._call, self.before, self._has_calls = None, "", True
        return parts

    def finish(self) -> list[Part]:
        if self._call is not None:
            return self._call.finish()
        return [] if self._has_calls else content(self.before)


class _Written(msgspec.Struct):
    """A call as the model writes it."""

    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments (JSON text of an object) of a call; None if `text` is not a call.

    The field with the arguments may be `arguments` or `parameters`; it may be an object, or a text that contains one.
    If it is absent, null or empty, the arguments are {}."""
    try:
        written = msgspec.json.decode(text, type=_Written)
        given = written.parameters if isinstance(written.arguments, msgspec.UnsetType) else written.arguments
        raw = b"null" if isinstance(given, msgspec.UnsetType) else bytes(given)
        arguments = msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = arguments if arguments.strip() not in ("", "null") else "{}"
    return (written.name, arguments) if written.name and is_object(arguments) else None


def _text_of(quoted: str) -> str | None:
    try:
        return msgspec.json.decode(quoted, type=str)
    except msgspec.DecodeError:
        return None
