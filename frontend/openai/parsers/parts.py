"""What an answer's text is made of, and the parsers that find it: text in pieces in, parts in the text's order out.

However a text is cut into pieces, the parts are the same when those of a kind are joined.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Protocol, TypeAlias

import msgspec

from ....ipc.codec import JsonObject


class Thought(msgspec.Struct, frozen=True):
    text: str


class Content(msgspec.Struct, frozen=True):
    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A call of a function. Its arguments follow, as JSON text in pieces, then its end."""

    name: str
    id: str = msgspec.field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class Arguments(msgspec.Struct, frozen=True):
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """`raw` is the call as the model wrote it: what an answer shows if the arguments turn out to be no JSON."""

    raw: str


Part: TypeAlias = Thought | Content | CallBegin | Arguments | CallEnd


class Parser(Protocol):
    """Takes all the text of one answer."""

    def append(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """What was held back; nothing comes after."""


def content(text: str) -> list[Part]:
    return [Content(text)] if text else []


def call(name: str, arguments: str, raw: str) -> list[Part]:
    """A call that came as a whole."""
    return [CallBegin(name), Arguments(arguments), CallEnd(raw)]


class ToolUse(msgspec.Struct, frozen=True):
    """A whole call of a function: its name and its arguments as JSON text."""

    id: str
    name: str
    arguments: str

    def to_json(self) -> JsonObject:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def whole_calls(parts: Iterable[Part]) -> tuple[str, list[ToolUse]]:
    """The content of an answer that has ended, and its calls: of those whose arguments are torn their raw text, as
    content."""
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
            use = ToolUse(begin.id, begin.name, "".join(arguments))
            if is_json(use.arguments):
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
    """Text that comes in pieces and is read from marker to marker. Owns what is held back."""

    def __init__(self) -> None:
        self.held = ""

    def until(self, *markers: str) -> tuple[str, str]:
        """Take the text before the next of the markers, and that marker; as long as there is none, the text that
        certainly comes before it, and ""."""
        found = _any_of(markers).search(self.held)
        if found is not None:
            before, self.held = self.held[: found.start()], self.held[found.end() :]
            return before, found[0]
        end = len(self.held) - max(held_back(self.held, marker) for marker in markers)
        before, self.held = self.held[:end], self.held[end:]
        return before, ""

    def take(self) -> str:
        """All that is held."""
        held, self.held = self.held, ""
        return held


@cache
def _any_of(markers: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
