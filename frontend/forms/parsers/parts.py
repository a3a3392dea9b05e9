"""Parts of an answer's text (reasoning, content, tool calls), and the interface of the parsers that find them.

A parser gets the text in pieces and returns its parts in order. However the text is cut into pieces, the parts are the
same once neighbours of the same kind are joined.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import ClassVar, Protocol, TypeAlias

import msgspec

from ....ipc.codec import JsonObject

_OBJECT_DECODER = msgspec.json.Decoder(dict)  # made once: that takes longer than a short text
_ID_CHARACTERS = 29  # of an id that is made here: call_ and 24 digits (base 16)
MAX_NULL = 64  # most characters of null and the white space after it


class Thought(msgspec.Struct, frozen=True):
    text: str


class Content(msgspec.Struct, frozen=True):
    text: str


class UnreadCall(Content, frozen=True):
    """Content that is a call of a tool up to the end of its arguments, which cannot be read."""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class CallBegin(msgspec.Struct, frozen=True):
    """The start of a function call. Its Arguments follow, JSON text in pieces, and then its CallEnd."""

    form: ClassVar = ("function", "arguments")  # a call's type, and its field with the text, in OpenAI's form
    name: str
    id: str = msgspec.field(default_factory=new_call_id)  # the model's own, if it wrote one

    @property
    def has_own_id(self) -> bool:
        """Whether the model wrote the id. An id in the form of those made here counts as made here."""
        return not (self.id.startswith("call_") and len(self.id) == _ID_CHARACTERS)


class Arguments(msgspec.Struct, frozen=True):
    form: ClassVar = CallBegin.form
    text: str


class CustomBegin(CallBegin, frozen=True):
    """The start of a custom tool's call. Its CustomInput follows, in pieces, and then its CallEnd."""

    form: ClassVar = ("custom", "input")


class CustomInput(Arguments, frozen=True):
    form: ClassVar = CustomBegin.form


class CallEnd(msgspec.Struct, frozen=True):
    """The end of a call. `raw`: the call as the model wrote it; it becomes content if a function's arguments are not a
    JSON object."""

    raw: str


Part: TypeAlias = Thought | Content | CallBegin | Arguments | CallEnd


class Parser(Protocol):
    """Interface of a parser of one answer."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that the parser looks for; some may be special tokens."""

    def append(self, text: str) -> list[Part]:
        """Read the next piece of the text, and return the parts that are certain now."""

    def finish(self) -> list[Part]:
        """Return the parts of the text that was held back. To be called last, once."""


def parsed(parsers: Iterable[Parser], text: str, *, is_last: bool) -> list[Part]:
    """Return the parts that parsers find in the next piece of an answer. Each parses the content that the one before it
    returned. `is_last`: no text will follow."""
    parts = content(text)
    for parser in parsers:
        read: list[Part] = []
        for part in parts:
            read += parser.append(part.text) if isinstance(part, Content) else [part]
        parts = [*read, *parser.finish()] if is_last else read
    return parts


def content(text: str) -> list[Part]:
    """Return `text` as a list with its Content; [] if it is empty."""
    return [Content(text)] if text else []


def call(name: str, arguments: str, raw: str) -> list[Part]:
    """Return the parts of a complete tool call. `raw`: the call as the model wrote it."""
    return [CallBegin(name), Arguments(arguments), CallEnd(raw)]


class ArgumentsWriter:
    """Writer of one call's arguments from pieces of text; null, or no text, becomes {}."""

    def __init__(self) -> None:
        self._held: str | None = ""  # the text so far, while it may be null

    def append(self, text: str) -> list[Part]:
        if self._held is not None:
            text = self._held = (self._held + text).lstrip()
            if len(text) <= MAX_NULL and "null".startswith(text.rstrip()):
                return []
            self._held = None
        return [Arguments(text)] if text else []

    def finish(self) -> list[Part]:
        if self._held is None:
            return []
        return [Arguments("{}" if self._held.strip() in ("", "null") else self._held)]


class ToolUse(msgspec.Struct, frozen=True):
    """A complete tool call. `arguments`: JSON text, or the input of a custom tool; `form`: see CallBegin."""

    id: str
    name: str
    arguments: str
    form: tuple[str, str]

    def to_json(self) -> JsonObject:
        kind, text = self.form
        return {"id": self.id, "type": kind, kind: {"name": self.name, text: self.arguments}}


class CallJoiner:
    """Joiner of the parts of tool calls to ToolUses."""

    def __init__(self) -> None:
        self._begin, self._arguments = CallBegin(""), list[str]()

    def read(self, part: Part) -> ToolUse | None:
        """Read the next part. Return the call at its end, unless it is a function call with arguments that are not a
        JSON object; else None."""
        if isinstance(part, CallBegin):
            self._begin, self._arguments = part, []
        elif isinstance(part, Arguments):
            self._arguments.append(part.text)
        elif isinstance(part, CallEnd):
            begin = self._begin
            use = ToolUse(begin.id, begin.name, "".join(self._arguments), begin.form)
            return use if isinstance(begin, CustomBegin) or is_object(use.arguments) else None
        return None


def whole_calls(parts: Iterable[Part]) -> tuple[str, list[ToolUse]]:
    """Return the content and the tool calls of a whole answer, without reasoning. A function call with arguments that
    are not a JSON object is content."""
    texts, calls, joiner = list[str](), list[ToolUse](), CallJoiner()
    for part in parts:
        use = joiner.read(part)
        if use is not None:
            calls.append(use)
        elif isinstance(part, Content):
            texts.append(part.text)
        elif isinstance(part, CallEnd):
            texts.append(part.raw)
    return "".join(texts), calls


def is_object(text: str) -> bool:
    """Return whether `text` is a JSON object, which the arguments of a function must be."""
    try:
        _OBJECT_DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
