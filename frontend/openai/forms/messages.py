"""Convert the messages of a chat request to the turns and variables of a chat template.

Templates take role and content as text, and for tools `tool_calls` (arguments as objects), `tool_call_id` and `name`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatForm, ChatMessage, TextPart
from ....ipc.messages.intake import BodyInput
from ..parsers.thoughts import ends_inside
from .schema import CUSTOM_INPUT, ChatRequest, FunctionCall, Message, MessagePart, NamedTool, TokenizeRequest, Tool

_TEXTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
_RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)


class ChatInput(NamedTuple):
    """Input of a chat template."""

    turns: list[ChatMessage]
    form: ChatForm
    echoed: str | None = None  # text of the last turn, if answers begin with it

    def prompt(self, token_ids: bytes, text: str | None) -> BodyInput:
        """Return the tokenized prompt, with `echoed` as its text and with whether it ends inside a thought. `text`: the
        rendered chat, if known."""
        is_inside = ends_inside(text or "", is_continued=self.form.is_continued)
        return BodyInput(text=self.echoed, token_ids=token_ids, is_of_chat=True, is_inside_thought=is_inside)


def chat_input(body: ChatRequest | TokenizeRequest) -> ChatInput:
    """Return the template's input for a chat; RequestError for fields that contradict each other."""
    if isinstance(body, ChatRequest):
        body = with_allowed_tools(body)
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
    is_continued, begins_turn = bool(body.continue_final_message), body.add_generation_prompt
    if is_continued and begins_turn:
        raise RequestError("continue_final_message cannot go with add_generation_prompt, which begins a turn: give one")
    variables["add_generation_prompt"] = not is_continued if begins_turn is None else begins_turn
    echoed = None
    if isinstance(body, ChatRequest):
        if body.documents is not None:
            variables["documents"] = body.documents
        if body.echo and (not variables["add_generation_prompt"] or turns[-1].role == "assistant"):
            echoed = turns[-1].text
    form = ChatForm(
        template=body.chat_template,
        variables=variables,
        add_special_tokens=bool(body.add_special_tokens),
        is_continued=is_continued,
    )
    return ChatInput(turns, form, echoed)


def with_allowed_tools(body: ChatRequest) -> ChatRequest:
    """Apply a tool_choice of type allowed_tools, if given: keep only these tools, and replace the choice by its mode.
    RequestError if it allows no tool, or one that `tools` lacks."""
    choice = body.tool_choice
    if not isinstance(choice, NamedTool) or choice.type != "allowed_tools":
        return body
    allowed = () if choice.allowed_tools is None else choice.allowed_tools.tools
    names, tools = {each.called.name for each in allowed}, body.tools or []
    kept = [tool for tool in tools if tool.called.name in names]
    if not kept or names - {tool.called.name for tool in kept}:
        given = ", ".join(tool.called.name for tool in tools)
        raise RequestError(f"tool_choice allows {', '.join(sorted(names)) or 'nothing'}; tools has {given or 'none'}")
    assert choice.allowed_tools is not None, "it allows what is kept"
    return msgspec.structs.replace(body, tools=kept, tool_choice=choice.allowed_tools.mode)


def shows_tools(body: ChatRequest | TokenizeRequest) -> bool:
    """Return whether the chat template gets the tools: there are any, and tool_choice is not none."""
    return bool(body.tools) and not (isinstance(body, ChatRequest) and body.tool_choice == "none")


def tools_for_template(tools: Sequence[Tool]) -> list[JsonObject]:
    """Return tools as Hugging Face's templates expect them: {type, function: {name, description, parameters}}."""
    listed: list[JsonObject] = []
    for tool in tools:
        function: JsonObject = {"name": tool.called.name}
        if tool.called.description is not None:
            function["description"] = tool.called.description
        function["parameters"] = tool.called.schema
        listed.append({"type": "function", "function": function})
    return listed


def _turn(position: int, message: Message) -> ChatMessage:
    where = f"messages[{position}]"
    if message.function_call is not None or message.audio is not None:
        raise RequestError(f"{where} holds function_call or audio, which are not served: use tool_calls and text")
    role = "system" if message.role == "developer" else message.role
    content, thought = content_of(f"{where}.content", message.content)
    optional = {name: getattr(message, name) for name in ("name", "reasoning_content", "tool_call_id")}
    more: JsonObject = {name: value for name, value in optional.items() if value is not None}
    if (thought := message.reasoning or thought) is not None:
        more.setdefault("reasoning_content", thought)
    if message.tool_calls:
        more["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.called.name, "arguments": _arguments(call.called)},
            }
            for call in message.tool_calls
        ]
    elif message.content is None and message.role != "assistant":
        raise RequestError(f"{where} has no content: give it a text")
    if not isinstance(content, str):
        return ChatMessage(role, [TextPart(part.text or "") for part in content], more)
    return ChatMessage(role, content, more)


def content_of(
    where: str, content: str | Sequence[MessagePart] | None, *, besides: Sequence[str] = ()
) -> tuple[str | list[MessagePart], str | None]:
    """Return the content of a message as a text or as parts of type text, and its thoughts joined with line breaks.

    `where`: path of the content, for errors. Parts with a type in `besides` are skipped. RequestError for parts
    other than text."""
    if content is None or isinstance(content, str):
        return content or "", None
    texts, thoughts = list[MessagePart](), list[str]()
    for position, part in enumerate(content):
        text = part.text if part.refusal is None else part.refusal
        if part.type in besides:
            continue
        if part.type in _THOUGHTS:
            thoughts.append(part.thinking or text or "")
        elif part.type not in _TEXTS:
            kind = f"{part.type!r:.40}"
            raise RequestError(f"{where}[{position}] is a part of type {kind}: only text is served, leave it out")
        elif text is None:
            raise RequestError(f"{where}[{position}] has no text: give one or leave the part out")
        else:
            texts.append(MessagePart(type="text", text=text))
    return texts, "\n".join(filter(None, thoughts)) or None


def _arguments(call: FunctionCall) -> JsonObject:
    """Return the arguments of a call as an object. Text that is not a JSON object counts as {}: a call that was cut off
    does not end the conversation."""
    given: str | JsonObject | None = call.arguments if call.input is None else {CUSTOM_INPUT: call.input}
    if isinstance(given, dict):
        return given
    try:
        value = msgspec.json.decode(given or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
