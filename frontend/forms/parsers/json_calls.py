"""Readers of tool calls in JSON, {"name": …, "arguments": {…}}, from text that arrives in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgspec

from .parts import Arguments, CallBegin, CallEnd, Part, content, is_object, new_call_id

Keys: TypeAlias = tuple[str, ...]  # of an object, of an object in it, and so on

MAX_HEAD = 1024  # most characters before the arguments of a call that is streamed
_TEXT = r'"(?:[^"\\]|\\.)*+"'
_FIELD = rf"{_TEXT}\s*+:\s*+(?:{_TEXT}|[\w.+-]++)\s*+,\s*+"  # one whose value is no object and no list
_OPEN = '{"": '
# decoders that are made once: `msgspec.json.decode` with a type takes five times as long for a short text
_FIELDS_DECODER, _TEXT_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(str)
_SYNONYMS = ("arguments", "parameters")
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


class CallShape(NamedTuple):
    """Where the name, the arguments and the id stand in a call's object: the keys that lead there. Without keys to the
    name it is itself the object's only key, and the arguments are its value."""

    name: Keys = ("name",)
    arguments: Keys = ("arguments",)
    id: Keys = ()


DEFAULT_SHAPE = CallShape()


class CallReader:
    """Reader of one call. Its parts are returned as they arrive if the object starts with name, id and arguments, the
    last behind the others and within MAX_HEAD characters; otherwise all are returned at its end. With `has_name` the
    object holds only the arguments.

    Once it `is_over`, `rest` is the text after the call, or the whole text if `is_call` is False. A call ends after
    its arguments if its object does not continue as JSON."""

    def __init__(self, before: str = "", *, has_name: bool = False, shape: CallShape = DEFAULT_SHAPE) -> None:
        """`before`: text before the object that is part of the raw call, such as its opening marker."""
        self.before = before
        self._shape = shape
        self._expected_head = compile_head(shape)
        self._depth = max(1, len(shape.arguments))  # objects that are open at the arguments
        self._head: list[str] = []
        self._num_read = 0  # characters of the head
        self._has_brace = False  # the head has more than white space
        self._begun = ""  # text of the object before its arguments
        self._ended = ""  # and behind them
        self._given: list[str] = []  # the arguments of a call that is streamed
        self._whole: JsonScanner | None = None
        self._num_scanned = 0  # characters of the head
        self._unscanned = 0  # number of the first piece of the head that was not scanned: the object goes on behind it
        self._arguments: JsonScanner | None = JsonScanner() if has_name else None
        self._has_tail = not has_name
        self._tail: list[str] = []  # text of the object after its arguments
        self._tail_end: JsonScanner | None = None  # set once the object continues after the arguments
        self.is_over = False
        self.is_call = has_name
        self.append = self._continue if has_name else self._begin
        self.rest = ""

    def finish(self) -> list[Part]:
        """Return the parts of an object that is incomplete at the end of the answer."""
        if self.is_over:
            return []
        return [self._end(), *content("".join(self._tail))] if self.is_call else content(self.before + self.held)

    @property
    def has_object(self) -> bool:
        """Whether the arguments of the call, which is over, are a JSON object."""
        return not self._given or is_object("".join(self._given))

    @property
    def held(self) -> str:
        """The text of an object whose name is not known yet."""
        return "".join(self._head)

    def _begin(self, text: str) -> list[Part]:
        self._head.append(text)
        num_before = self._num_read
        self._num_read += len(text)
        if "{" in text and num_before < MAX_HEAD:  # the first text with which there may be a head: it ends at a brace
            held = self.held
            head = self._expected_head.match(held[:MAX_HEAD])
            if head is not None and (begin := self._begin_of(head)) is not None:
                self.is_call, self._arguments = True, JsonScanner()
                self.append = self._continue
                self._begun = head[0]
                return [begin, *self._continue(held[head.end() :])]
        if not self._has_brace and (begun := text.lstrip()):
            self._has_brace = True
            if begun[0] != "{":
                self.is_over, self.rest = True, self.held
                return []
        if "}" in text or "]" in text or "<" in text:  # else the object goes on
            return self._begin_whole()
        return []

    def _begin_whole(self) -> list[Part]:
        """Return the parts of a call that none of its head showed, if its object ends in the text so far."""
        if self._whole is None:
            self._whole = JsonScanner()
        end = self._num_scanned + self._whole.append("".join(self._head[self._unscanned :]))
        self._num_scanned = self._num_read
        self._unscanned = len(self._head)
        if not self._whole.is_over:
            return []
        self.is_over = True
        held = self.held
        found = _read_call(held[:end], self._shape)
        if found is None:
            self.rest = held
            return []
        self.is_call, self.rest = True, held[end:]
        begin, arguments = found
        return [begin, Arguments(arguments), CallEnd(self.before + held[:end])]

    def _begin_of(self, head: re.Match[str]) -> CallBegin | None:
        """Return the begin of a call whose object starts with `head`; None if its id may still come."""
        if head.lastindex and (name := _text_in(head[1])):
            return CallBegin(name)
        whole = head[0] + "{}" + "}" * self._depth
        found = _read_call(whole, self._shape)
        if found is None or (self._shape.id and _id_in(msgspec.json.decode(whole), self._shape.id) is None):
            return None
        return found[0]

    def _continue(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._arguments is not None:
            end = self._arguments.append(text)
            if end:
                piece = text[:end]
                parts.append(Arguments(piece))
                self._given.append(piece)
            if not self._arguments.is_over:
                return parts
            text = text[end:]
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
            closing = "}" * self._depth
            if text.startswith(closing) and not self._tail:
                self.is_over = True
                self._ended = closing
                return text[len(closing) :]
            begun = text.lstrip()
            if begun and begun[0] in "},":
                self._tail_end = JsonScanner(depth=self._depth)
            elif begun:
                self.is_over = True
        end = 0 if self._tail_end is None else self._tail_end.append(text)
        self.is_over |= self._tail_end is not None and self._tail_end.is_over
        self._tail.append(text[:end] if self.is_over else text)
        if not self.is_over:
            return ""
        tail, rest = "".join(self._tail), text[end:]
        if self._tail_end is None or not self._tail_end.is_whole or not is_object(_OPEN * self._depth + "0" + tail):
            return tail + rest
        self._ended = tail
        return rest

    def _end(self) -> CallEnd:
        return CallEnd("".join([self.before, self._begun, *self._given, self._ended]))


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


@lru_cache(maxsize=64)
def compile_head(shape: CallShape) -> re.Pattern[str]:
    """Return an expression that matches a call's object up to its arguments, if they are an object. Its group is the
    name, with quotes, of an object that has nothing else before them."""
    if not shape.arguments:
        return re.compile(rf"\s*+\{{\s*+{_TEXT}\s*+:\s*+(?=\{{)")
    *outer, last = shape.arguments
    keys = [re.escape(json.dumps(key)) for key in outer]
    keys.append(f"(?:{'|'.join(re.escape(json.dumps(key)) for key in _synonyms(last))})")
    before = [f"(?:{_FIELD})*?"] * len(keys)
    if shape.name and [*shape.name[:-1]] == outer and not shape.id:
        key = re.escape(json.dumps(shape.name[-1]))
        before[-1] = rf"(?:{key}\s*+:\s*+({_TEXT})\s*+,\s*+|{before[-1]})"
    objects = (rf"\{{\s*+{fields}{key}\s*+:\s*+" for fields, key in zip(before, keys, strict=True))
    return re.compile(r"\s*+" + "".join(objects) + r"(?=\{)")


def _text_in(quoted: str) -> str:
    """Return the text that a JSON string holds; "" if it is none."""
    try:
        return _TEXT_DECODER.decode(quoted)
    except msgspec.DecodeError:
        return ""


@lru_cache(maxsize=64)
def _synonyms(key: str) -> Sequence[str]:
    return (key, *(each for each in _SYNONYMS if key in _SYNONYMS and each != key))


def _read_call(text: str, shape: CallShape) -> tuple[CallBegin, str] | None:
    """Return the begin and the arguments (JSON text of an object) of a call; None if `text` is not a call.

    The arguments may be an object, or a text that contains one, under the key `arguments` or `parameters` if the shape
    has one of them. If they are absent, null or empty, they are {}."""
    try:
        if shape.name:
            *outer, last = shape.arguments
            fields = _fields_at(text, outer)
            raw = next((bytes(fields[key]) for key in _synonyms(last) if key in fields), b"null")
            *outer_of_name, key = shape.name
            if outer_of_name != outer:
                fields = _fields_at(text, outer_of_name)
            name = _TEXT_DECODER.decode(fields.get(key, b""))
        else:
            ((name, value),) = _fields_at(text, ()).items()
            raw = bytes(value)
        arguments = _TEXT_DECODER.decode(raw) if raw.startswith(b'"') else raw.decode()
        own_id = _id_in(msgspec.json.decode(text), shape.id) if shape.id else None
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    if arguments.strip() in ("", "null"):
        arguments = "{}"
    if not name or not is_object(arguments):
        return None
    return CallBegin(name, own_id or new_call_id()), arguments


def _fields_at(text: str, keys: Sequence[str]) -> dict[str, msgspec.Raw]:
    """Return the JSON text of each value in an object; none if the object is absent. DecodeError for other values."""
    fields = _FIELDS_DECODER.decode(text)
    for key in keys:
        fields = _FIELDS_DECODER.decode(fields.get(key, b"{}"))
    return fields


def _id_in(value: object, keys: Keys) -> str | None:
    """Return a call's id, a text or a number in its object; None if it has none."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value) or None
