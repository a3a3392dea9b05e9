"""Parts of an answer's text (thought, content, calls) and the protocol of the parsers that find them.

A parser takes the text in pieces and returns its parts in order. The pieces may be cut anywhere: joined with their
neighbours of the same kind, the parts are equal.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cache
from typing import ClassVar, Protocol, TypeAlias

import msgspec

from ....ipc.codec import JsonObject


class Thought(msgspec.Struct, frozen=True):
    text: str


class Content(msgspec.Struct, frozen=True):
    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """Begin of a function call. Its Arguments follow, JSON text in pieces, and then its CallEnd."""

    form: ClassVar = ("function", "arguments")  # names of its type and its text
    name: str
    id: str = msgspec.field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class Arguments(msgspec.Struct, frozen=True):
    form: ClassVar = CallBegin.form
    text: str


class CustomBegin(CallBegin, frozen=True):
    """A call of a custom tool. Its input follows in pieces, then its end."""

    form: ClassVar = ("custom", "input")


class CustomInput(Arguments, frozen=True):
    form: ClassVar = CustomBegin.form


class CallEnd(msgspec.Struct, frozen=True):
    """End of a function call. `raw`: the call as the model wrote it, which is content if the arguments are not JSON."""

    raw: str


Part: TypeAlias = Thought | Content | CallBegin | Arguments | CallEnd


class Parser(Protocol):
    """Parser of one answer."""

    def append(self, text: str) -> list[Part]:
        """Take the next piece of the text and return the parts that are certain."""

    def finish(self) -> list[Part]:
        """Return the parts of the text that was held back. This is the last call."""


def content(text: str) -> list[Part]:
    """Return `text` as content; nothing if it is empty."""
    return [Content(text)] if text else []


def call(name: str, arguments: str, raw: str) -> list[Part]:
    """Return the parts of a whole call."""
    return [CallBegin(name), Arguments(arguments), CallEnd(raw)]


class ToolUse(msgspec.Struct, frozen=True):
    """Whole call. `arguments` is JSON text, or the input of a custom tool."""

    id: str
    name: str
    arguments: str
    form: tuple[str, str]

    def to_json(self) -> JsonObject:
        kind, text = self.form
        return {"id": self.id, "type": kind, kind: {"name": self.name, text: self.arguments}}


def whole_calls(parts: Iterable[Part]) -> tuple[str, list[ToolUse]]:
    """Return content and calls of a whole answer. A call is content if its arguments are not valid JSON."""
    texts: list[str] = []
    calls: list[ToolUse] = []
    begin, arguments = CallBegin(""), list[str]()
    for part in parts:
        if isinstance(part, Content):
            texts.append(part.text)
        elif isinstance(part, CallBegin):
            begin, arguments = part, []
        elif isinstance(part, Arguments):
            arguments.append(part.text)
        elif isinstance(part, CallEnd):
            use = ToolUse(begin.id, begin.name, "".join(arguments), begin.form)
            if isinstance(begin, CustomBegin) or is_json(use.arguments):
                calls.append(use)
            else:
                texts.append(part.raw)
    return "".join(texts), calls


def is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


class MarkedText:
    """Buffer of text that is read from marker to marker. Add pieces to `held`."""

    def __init__(self) -> None:
        self.held = ""

    def until(self, *markers: str) -> tuple[str, str]:
        """Take the text before the next marker, and that marker.

        Without a marker, take the text that cannot be the beginning of one, and ""."""
        found = _any_of(markers).search(self.held)
        if found is not None:
            before, self.held = self.held[: found.start()], self.held[found.end() :]
            return before, found[0]
        end = len(self.held) - max(held_back(self.held, marker) for marker in markers)
        before, self.held = self.held[:end], self.held[end:]
        return before, ""

    def take(self) -> str:
        """Take all of the held text."""
        held, self.held = self.held, ""
        return held


@cache
def _any_of(markers: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def held_back(text: str, marker: str) -> int:
    """Return the number of characters at the end of `text` that may begin `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
