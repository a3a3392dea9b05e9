"""ChatFields: the fields from which a chat was rendered, as digests, for comparisons of chats without their texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from ...ipc.codec import JsonObject
from ...ipc.messages.client import ChatField, ChatForm, ChatMessage

_OF_VALUES = b"0123456789abcdefABCDEF:-/."  # characters that a time, a number or an id may change


def chat_fields(turns: Sequence[ChatMessage], form: ChatForm | None) -> list[ChatField]:
    """Return the fields of a chat: its tools, the other variables of the template, and of each message content and
    further fields."""
    variables: JsonObject = {} if form is None else form.variables
    return [*_of_variables(variables), *_of_turns(turns)]


def _of_variables(variables: JsonObject) -> Iterator[ChatField]:
    tools = variables.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        yield _field(f"tools[{index}]", "tools", tool)
    others = {name: value for name, value in variables.items() if name != "tools"}
    if others:
        yield _field("chat_template_kwargs", "", others)


def _of_turns(turns: Sequence[ChatMessage]) -> Iterator[ChatField]:
    for index, turn in enumerate(turns):
        place = f"messages[{index}]"
        yield _field(f"{place}.content", turn.role, turn.content)
        for name, value in turn.more.items():
            yield _field(f"{place}.{name}", turn.role, value)


def _field(name: str, role: str, value: object) -> ChatField:
    data = msgspec.json.encode(value)
    return ChatField(name, role, _digest(data), _digest(data.translate(None, _OF_VALUES)))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()
