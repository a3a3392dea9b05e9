"""Read calls in JSON, {"name": …, "arguments": {…}}, from text that comes in pieces."""

from __future__ import annotations

import json
import re

from .parts import Arguments, CallBegin, CallEnd, Part, call, content

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OUTSIDE, _IN_TEXT = re.compile(r'["\[\]{}<]'), re.compile(r'["\\]')


class JsonScanner:
    """Scanner for the end of a JSON object or list. `is_over`: the end was found, or a < outside strings (a marker)."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_in_text = self._is_escaped = False
        self.is_over = False

    def append(self, text: str) -> int:
        """Scan the next text and return the number of its characters that belong to the object."""
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
                    self.is_over = True
                    return position
        return len(text)


class CallReader:
    """Reader of one call. Parts come early if the object begins with name and arguments, in this order; otherwise all
    come at its end. With `has_name` the name was read before, and the object holds only the arguments.

    Once it `is_over`, `rest` is the text after the call, or the whole text if `is_call` is False."""

    def __init__(self, before: str = "", *, has_name: bool = False) -> None:
        """`before`: text before the object that is part of the raw call, such as its opening marker."""
        self._before = before
        self._head = ""
        self._raw: list[str] = []
        self._whole = JsonScanner()
        self._arguments: JsonScanner | None = JsonScanner() if has_name else None
        self._tail = None if has_name else JsonScanner(depth=1)
        self.is_over = False
        self.is_call = has_name
        self.rest = ""

    def append(self, text: str) -> list[Part]:
        return self._continue(text) if self.is_call else self._begin(text)

    def finish(self) -> list[Part]:
        """Return the parts of an object that the end of the text cuts off."""
        if self.is_over:
            return []
        return [self._end()] if self.is_call else content(self._before + self._head)

    def _begin(self, text: str) -> list[Part]:
        self._head += text
        if (head := _HEAD.match(self._head)) is not None and (name := _text_of(head[1])) is not None:
            self.is_call, self._arguments = True, JsonScanner()
            self._raw.append(head[0])
            return [CallBegin(name), *self._continue(self._head[head.end() :])]
        begun = self._head.lstrip()
        if begun and begun[0] != "{":
            self.is_over, self.rest = True, self._head
            return []
        end = len(self._head) - len(text) + self._whole.append(text)
        if not self._whole.is_over:
            return []
        self.is_over = True
        found = read_call(self._head[:end])
        if found is None:
            self.rest = self._head
            return []
        self.is_call, self.rest = True, self._head[end:]
        return call(*found, raw=self._before + self._head[:end])

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
        end = 0 if self._tail is None else self._tail.append(text)
        self._raw.append(text[:end])
        if self._tail is None or self._tail.is_over:
            self.is_over, self.rest = True, text[end:]
            parts.append(self._end())
        return parts

    def _end(self) -> CallEnd:
        return CallEnd(self._before + "".join(self._raw))


class CallListReader:
    """Reader of consecutive calls. Other text ends the list: then it `is_over`, `rest` is that text, and `before` the
    separators between it and the last call."""

    def __init__(self, between: str, before: str = "") -> None:
        """`between`: the characters that may separate calls. `before`: text before the list that is part of the first
        raw call."""
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


def read_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments (JSON text) of a call, or None if `text` is not a call.

    The arguments may be called arguments or parameters; both absent means {}. They are an object, or a text, which is
    returned unchecked."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return value["name"], arguments
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _text_of(quoted: str) -> str | None:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return None
