"""Tool calls in the messages of a chat, and their ids in the form that a template takes.

Clients may leave ids out, and send those of another model's conversation. Mistral's templates refuse an id that does
not have nine characters.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from ....ipc.messages.client import ChatMessage

NUM_CHARACTERS = 9  # of an id in Mistral's templates
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def calls_of(message: ChatMessage) -> list[object]:
    """Return the tool calls in a message."""
    calls = message.more.get("tool_calls")
    return calls if isinstance(calls, list) else []


def has_calls(message: ChatMessage) -> bool:
    """Return whether a message has tool calls or is the result of one."""
    return message.role == "tool" or bool(calls_of(message))


def short_id(given: str) -> str:
    """Return `given` if it has nine letters and digits, else nine that are derived from it: always the same."""
    if len(given) == NUM_CHARACTERS and given.isascii() and given.isalnum():
        return given
    number = int.from_bytes(hashlib.sha256(given.encode(errors="surrogatepass")).digest())
    digits = []
    for _ in range(NUM_CHARACTERS):
        number, digit = divmod(number, len(_LETTERS))
        digits.append(_LETTERS[digit])
    return "".join(digits)


def with_ids(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return the messages with an id for each call that has none, made from its place in the chat, and for each result
    that has none: that of the first call before it without a result, of the result's name if there is one."""
    if all(map(_has_ids, messages)):
        return messages
    completion = _Completion()
    return list(map(completion.of, messages))


def _has_ids(message: ChatMessage) -> bool:
    if message.role == "tool":
        return bool(message.more.get("tool_call_id"))
    return all(not isinstance(call, Mapping) or call.get("id") for call in calls_of(message))


class _Completion:
    """The messages so far: how many calls they have, and which of these have no result yet."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._waiting = set[str]()  # ids of calls without a result
        self._ids_by_name = defaultdict[object, deque[str]](deque)  # in order; "" has all; some have a result by now

    def of(self, message: ChatMessage) -> ChatMessage:
        """Return the next message with ids."""
        if message.role == "tool":
            call_id = message.more.get("tool_call_id") or self._first(message.more.get("name")) or self._first("")
            self._waiting.discard(str(call_id))
            return _with(message, "tool_call_id", call_id)
        return _with(message, "tool_calls", list(map(self._call, calls_of(message))))

    def _call(self, call: object) -> object:
        self._num_calls += 1
        if not isinstance(call, Mapping):
            return call
        call_id = call.get("id") or f"call{self._num_calls:05}"
        function = call.get("function")
        self._waiting.add(str(call_id))
        self._ids_by_name[""].append(str(call_id))
        if isinstance(function, Mapping):
            self._ids_by_name[str(function.get("name"))].append(str(call_id))
        return {**call, "id": call_id}

    def _first(self, name: object) -> str | None:
        """Return the id of the first call of this name without a result; None if there is none."""
        ids = self._ids_by_name.get(name, deque())
        while ids and ids[0] not in self._waiting:
            ids.popleft()
        return next(iter(ids), None)


def _with(message: ChatMessage, name: str, value: object) -> ChatMessage:
    """Return the message with a further field; as it is if the value is empty."""
    if not value:
        return message
    return ChatMessage(message.role, message.content, message.more | {name: value})
