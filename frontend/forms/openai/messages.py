"""Convert the messages of a chat request to the turns and variables of a chat template.

Templates take role and content as text, and for tools also `tool_calls`, `tool_call_id` and `name`, in the form that
`text/turn_shape.py` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatForm, ChatMessage, MediaPart, Medium, TextPart
from ....ipc.messages.intake import BodyInput
from ....ipc.messages.media import MEDIUM
from ..answer_forms.named import ends_inside
from ..chat_fields import chat_fields
from ..media.data_url import is_data_url, least_bytes
from ..media.given_media import URL_SCHEMES, GivenMedia
from ..media_limits import MediaLimits
from .parts import MediumPart, content_of
from .schema import ChatRequest, Message, TokenizeRequest
from .tools import CUSTOM_INPUT, FunctionCall, NamedFunction, NamedTool, Tool, ToolCall

_ROLES = {"developer": "system", "function": "tool"}  # role in a request → role that templates know
_CALL_ID = "call{:05}"  # id of a call without one, from its message's index; Mistral's templates need 9 characters
_RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)


class ChatInput(NamedTuple):
    """The input of a chat template, and the media of the chat."""

    turns: list[ChatMessage]
    form: ChatForm
    echoed: str | None = None  # text of the last turn, if answers start with it
    media: Sequence[Medium] = ()

    def prompt(self, token_ids: bytes, text: str | None) -> BodyInput:
        """Return the tokenized prompt as a BodyInput, with `echoed` as its text and whether it ends inside reasoning.
        `text`: the rendered chat, if known."""
        is_inside = ends_inside(text or "", is_continued=self.form.is_continued)
        return BodyInput(
            text=self.echoed,
            token_ids=token_ids,
            is_of_chat=True,
            is_inside_thought=is_inside,
            media=list(self.media),
            chat_fields=chat_fields(self.turns, self.form),
        )


class ChatMedia:
    """The media of a chat, collected in order and checked before they are decoded."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits, self._given = limits, GivenMedia()

    @property
    def media(self) -> list[Medium]:
        return self._given.media

    def add(self, part: MediumPart) -> MediaPart:
        """Add a medium and return the part that stands for it. RequestError, with its place in the body, if it is not
        allowed or invalid."""
        url = None if part.url is None else part.url.strip()
        try:
            self._limits.check_count(part.kind, len(self.media) + 1)
            if url is not None and not url[:6].lower().startswith(URL_SCHEMES):
                raise RequestError(f"the {MEDIUM[part.kind]} {url!r:.40} is no data:, http(s): or file: URL")
            if url is not None and is_data_url(url):
                self._limits.check_bytes(least_bytes(url))
            return self._given.add(url, part.kind, part.uuid, part.detail)
        except RequestError as error:
            raise RequestError(f"{part.where}: {error}") from None


def chat_input(body: ChatRequest | TokenizeRequest, limits: MediaLimits) -> ChatInput:
    """Return the template's input for a chat. RequestError if a field or a medium is invalid, or fields contradict each
    other."""
    media = ChatMedia(limits)
    if isinstance(body, ChatRequest):
        body = with_allowed_tools(body)
    turns = [_turn(position, message, media) for position, message in enumerate(body.messages or ())]
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
    return ChatInput(turns, form, echoed, media.media)


def _with_functions(body: ChatRequest) -> ChatRequest:
    """Return the body with `functions` and `function_call`, OpenAI's older form, as tools and tool_choice; answers then
    have at most one call. RequestError if they are invalid or both forms are given."""
    functions, choice = body.functions or (), body.function_call
    if isinstance(choice, NamedFunction) and choice.name not in (names := [each.name for each in functions]):
        raise RequestError(f"function_call names {choice.name!r:.80}, functions has {', '.join(names) or 'none'}")
    if not functions:
        return body
    if body.tools or body.tool_choice is not None:
        raise RequestError("functions is the older form of tools and tool_choice: give one form")
    for position, each in enumerate(functions):
        if not each.name:
            raise RequestError(f"functions[{position}].name is empty: give the function a name")
    return msgspec.structs.replace(
        body,
        tools=[Tool(function=each) for each in functions],
        tool_choice=NamedTool(function=choice) if isinstance(choice, NamedFunction) else choice,
        parallel_tool_calls=False,
    )


def with_allowed_tools(body: ChatRequest) -> ChatRequest:
    """Return the body with OpenAI's older `functions` as tools, and without a tool_choice of type allowed_tools: only
    the allowed tools are kept, and the choice becomes its mode. RequestError if it allows no tool, or one that `tools`
    lacks, or if `functions` are invalid."""
    body = _with_functions(body)
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


def _turn(position: int, message: Message, media: ChatMedia) -> ChatMessage:
    where = f"messages[{position}]"
    if message.audio is not None:
        raise RequestError(f"{where}.audio is not served: use text")
    role = _ROLES.get(message.role, message.role)
    given = message.refusal if message.content is None else message.content
    content, thought = content_of(f"{where}.content", given)
    optional = {name: getattr(message, name) for name in ("name", "reasoning_content", "tool_call_id")}
    more: JsonObject = {name: value for name, value in optional.items() if value is not None}
    if (thought := message.reasoning or message.thinking or thought) is not None:
        more.setdefault("reasoning_content", thought)
    calls = message.tool_calls or []
    if message.function_call is not None:
        calls = [ToolCall(id=_CALL_ID.format(position), function=message.function_call)]
    if message.role == "function":
        more.setdefault("tool_call_id", _CALL_ID.format(position - 1))
    if calls:
        more["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.called.name, "arguments": _arguments(call.called)},
            }
            for call in calls
        ]
        if given is None:
            return ChatMessage(role, None, more)
    elif given is None and message.role != "assistant":
        raise RequestError(f"{where} has no content: give it a text")
    if not isinstance(content, str):
        parts = [media.add(part) if isinstance(part, MediumPart) else TextPart(part.text or "") for part in content]
        return ChatMessage(role, parts, more)
    return ChatMessage(role, content, more)


def _arguments(call: FunctionCall) -> str | JsonObject | None:
    return call.arguments if call.input is None else {CUSTOM_INPUT: call.input}
