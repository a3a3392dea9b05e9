"""Forms of a chat for templates that refuse some of its turns.

Agents send several system messages, some of them late in the chat, and users' messages that follow each other. Many
templates take one system message at the beginning, or none, and want turns to alternate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ....ipc.messages.client import ChatMessage, TextPart

GAP = "\n\n"  # between texts that become one message


def other_forms(messages: Sequence[ChatMessage]) -> Iterator[Sequence[ChatMessage]]:
    """Yield the chat in the forms to try after a template has refused it, each different from the one before: with one
    system message, at the beginning, later ones as the user's, and the texts of users that follow each other joined;
    then, if a user's message follows it, without the system message, whose text is put before that message."""
    first = 0
    while first < len(messages) and messages[first].role == "system":
        first += 1
    system = list(_joined(messages[:first]))
    turns = list(_joined(map(_as_users, messages[first:])))
    form = [*system, *turns]
    if form != list(messages):
        yield form
    if system and turns and turns[0].role == "user":
        yield [_both(_as_users(system[0]), turns[0]), *turns[1:]]


def _as_users(message: ChatMessage) -> ChatMessage:
    """Return a system message as one of the user; others as they are."""
    if message.role != "system":
        return message
    return ChatMessage("user", message.content)


def _joined(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages, of which those of the system or of users that follow each other are one."""
    last: ChatMessage | None = None
    for message in messages:
        if last is not None and last.role == message.role and message.role in ("system", "user"):
            last = _both(last, message)
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _both(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    """Return one message with the contents of two, in their order."""
    if isinstance(first.content, str) and isinstance(second.content, str):
        return ChatMessage(first.role, f"{first.content}{GAP}{second.content}", second.more)
    return ChatMessage(first.role, [*first.parts, TextPart(GAP), *second.parts], second.more)
