"""Messages of a chat request → the turns that a chat template takes, and from there the prompt.

Templates know role and content as text, and for tools `tool_calls` (arguments as objects), `tool_call_id` and `name`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatForm, ChatMessage
from .schema import ChatRequest, Message, TextPart, TokenizeRequest, Tool

_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


class ChatInput(NamedTuple):
    """What a chat template gets."""

    turns: list[ChatMessage]
    form: ChatForm


def chat_input(body: ChatRequest | TokenizeRequest) -> ChatInput:
    """The turns of a chat, and how they become a prompt."""
    turns = [_turn(position, message) for position, message in enumerate(body.messages or ())]
    if not turns:
        raise RequestError("messages is empty: give at least one")
    variables: JsonObject = dict(body.chat_template_kwargs or {})
    if _RESERVED & variables.keys():
        raise RequestError(
            f"chat_template_kwargs holds {', '.join(sorted(_RESERVED & variables.keys()))}: use the fields"
        )
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.tools and shows_tools(body):
        variables["tools"] = tools_for_template(body.tools)
    variables["add_generation_prompt"] = body.add_generation_prompt is not False
    return ChatInput(turns, ChatForm(variables=variables))


def shows_tools(body: ChatRequest | TokenizeRequest) -> bool:
    """Whether the model gets to see the tools."""
    return bool(body.tools) and not (isinstance(body, ChatRequest) and body.tool_choice == "none")


def tools_for_template(tools: Sequence[Tool]) -> list[JsonObject]:
    """As Hugging Face's templates expect them: the request's own objects without what was not given."""
    listed: list[JsonObject] = []
    for tool in tools:
        function: JsonObject = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        function["parameters"] = tool.function.schema
        listed.append({"type": "function", "function": function})
    return listed


def _turn(position: int, message: Message) -> ChatMessage:
    where = f"messages[{position}]"
    if message.function_call is not None or message.audio is not None:
        raise RequestError(f"{where} holds function_call or audio, which are not served: use tool_calls and text")
    role = "system" if message.role == "developer" else message.role
    optional = {name: getattr(message, name) for name in ("name", "reasoning_content", "tool_call_id")}
    more: JsonObject = {name: value for name, value in optional.items() if value is not None}
    if message.tool_calls:
        more["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    elif message.content is None and message.role != "assistant":
        raise RequestError(f"{where} has no content")
    return ChatMessage(role, _text(where, message.content), more)


def _text(where: str, content: str | list[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = ((part.type, part.text if part.refusal is None else part.refusal) for part in content)
    return "\n".join(text_of(where, kind, text) for kind, text in parts)


def text_of(where: str, kind: str, text: str | None) -> str:
    """The text of a part of a message, of the type `kind`."""
    if kind not in ("text", "input_text", "output_text", "refusal") or text is None:
        raise RequestError(f"{where} holds a part of type {kind!r:.40}: only text is served")
    return text


def _arguments(given: str | JsonObject | None) -> JsonObject:
    """As templates take them. Text that is no JSON object, such as that of a call which was cut short, counts as none:
    the conversation goes on."""
    if isinstance(given, dict):
        return given
    try:
        value = msgspec.json.decode(given or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
