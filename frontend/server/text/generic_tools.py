"""Tools for a chat template that has no place for them: written into the messages, in the form of Hermes.

The functions stand in the system message, or before the first message if the template has no place for that either.
Calls and results of earlier turns become text of an answer and of a user, unless the template mentions them.
`--tool-call-parser hermes` reads the calls back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from ....ipc.codec import JsonObject
from ....ipc.messages.client import ChatMessage, TextPart
from .calls import calls_of

OPENING, CLOSING = "<tool_call>", "</tool_call>"

HEAD = "You can call functions. Each line between <tools> and </tools> describes one of them:\n<tools>\n"
TAIL = (
    "\n</tools>\nTo call a function, write a JSON object with its name and arguments, like this:\n"
    f'{OPENING}\n{{"name": "…", "arguments": {{…}}}}\n{CLOSING}\n'
    "Call one only if you need it; otherwise answer as usual. Results stand between <tool_response> and "
    "</tool_response>."
)


def calls_as_text(messages: Sequence[ChatMessage], template: str) -> Sequence[ChatMessage]:
    """Return the messages with their calls and results as text, unless the template mentions them."""
    if "tool" in template or not any(message.role == "tool" or calls_of(message) for message in messages):
        return messages
    return list(_merged(map(_as_text, messages)))


def with_tools(
    messages: Sequence[ChatMessage], tools: object, template: str, shows_system: Callable[[], bool]
) -> Sequence[ChatMessage]:
    """Return the messages with `tools`, a list in OpenAI's form or None, unless the template has a place for tools.
    `shows_system` returns whether the template shows system messages."""
    if "tools" in template or not isinstance(tools, list) or not tools:
        return messages
    turns = list(messages)
    described = HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + TAIL
    if turns and turns[0].role == "system":
        return [ChatMessage("system", f"{turns[0].text}\n\n{described}", turns[0].more), *turns[1:]]
    if turns and not shows_system():
        return [_preceded(turns[0], f"{described}\n\n"), *turns[1:]]
    return [ChatMessage("system", described), *turns]


def _as_text(message: ChatMessage) -> ChatMessage:
    """Return a result as a user's message, and an answer with its calls as text; other messages as they are."""
    if message.role == "tool":
        return ChatMessage("user", f"<tool_response>\n{message.text}\n</tool_response>")
    calls = calls_of(message)
    if not calls:
        return message
    more = {name: value for name, value in message.more.items() if name != "tool_calls"}
    lines = "\n".join(filter(None, [message.text, *map(_call_text, calls)]))
    return ChatMessage(message.role, lines, more)


def _call_text(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return ""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):  # a call that was cut off: as the model wrote it
            return f'{OPENING}\n{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}\n{CLOSING}'
    written: JsonObject = {"name": function.get("name"), "arguments": arguments or {}}
    return f"{OPENING}\n{json.dumps(written, ensure_ascii=False)}\n{CLOSING}"


def _merged(messages: Iterable[ChatMessage]) -> Iterable[ChatMessage]:
    """Yield the messages, with each tool result joined to the user's message after it: some templates require turns to
    alternate."""
    last: ChatMessage | None = None
    for message in messages:
        if last is not None and last.role == message.role == "user" and _is_result(last):
            last = _preceded(message, f"{last.text}\n")
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _is_result(message: ChatMessage) -> bool:
    return message.text.startswith("<tool_response>")


def _preceded(message: ChatMessage, text: str) -> ChatMessage:
    """Return a message with `text` put before its own text."""
    if isinstance(message.content, list):
        return ChatMessage(message.role, [TextPart(text), *message.content], message.more)
    return ChatMessage(message.role, text + (message.content or ""), message.more)
