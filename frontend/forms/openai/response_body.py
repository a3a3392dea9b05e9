"""Define the body of /v1/responses and rewrite it as a chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.params.sampling_params import LENGTH
from .params import refuse_unserved
from .parts import MessagePart, Sent, content_of
from .schema import (
    AllowedTool,
    AllowedTools,
    Body,
    ChatRequest,
    Conversation,
    CustomFormat,
    CustomTool,
    Function,
    FunctionCall,
    Generation,
    JsonSchemaFormat,
    Length,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
    items,
)

PLAIN = "functions"  # the namespace of tools without a namespace
LOGPROBS = "message.output_text.logprobs"  # value in `include` that asks for logprobs


class InputItem(Sent, frozen=True, kw_only=True):
    """Message, tool call, output of a call, reasoning of an earlier answer, or further tools, as Codex sends them."""

    # calls of tools that are left out too, and their outputs, which answers of other servers contain
    LEFT_OUT: ClassVar = (
        r"(?!(?:custom_tool|function)_call(?:_output)?$)(?:.+_call(?:_output)?|mcp_.+|tool_search_output|compaction.*)"
    )

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "additional_tools",
    ] = "message"
    role: str | None = None
    content: str | list[MessagePart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | JsonObject | None = None
    input: str | None = None
    output: str | list[MessagePart] | None = None
    tools: list[ResponseTool] | None = None


class ResponseTool(Function, frozen=True, kw_only=True):
    """Function, custom tool, or namespace of such tools. The tool's fields are on one level with `type`; in a chat they
    are in an object that is named by the type."""

    LEFT_OUT: ClassVar = "(?!(?:function|custom|namespace)$).*"  # tools that the server would run

    type: Literal["function", "custom", "namespace"]
    format: CustomFormat | None = None
    tools: list[ResponseTool] | None = None  # the tools of a namespace

    def members(self) -> Iterator[tuple[str | None, ResponseTool]]:
        """Yield (name of the namespace, tool) for each tool of a namespace, or (None, self) for a tool."""
        if self.type != "namespace":
            yield None, self
        for each in self.tools or () if self.type == "namespace" else ():
            yield self.name, each


class ResponseToolName(NamedFunction, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["function", "custom"]
    namespace: str | None = None

    @property
    def in_chat(self) -> NamedFunction:
        return NamedFunction(name=flat_name(self.namespace, self.name))


class ResponseToolChoice(Body, frozen=True, kw_only=True, omit_defaults=True):
    """The tool that must be called, or a list of allowed tools."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ResponseToolName] | None = None

    def to_chat(self) -> NamedTool:
        """Return this choice in the form of a chat's tool_choice."""
        named = NamedFunction(name=flat_name(self.namespace, self.name))
        allowed = [AllowedTool(type=each.type, function=each.in_chat, custom=each.in_chat) for each in self.tools or ()]
        lists = AllowedTools(mode=self.mode, tools=allowed) if self.type == "allowed_tools" else None
        return NamedTool(type=self.type, function=named, custom=named, allowed_tools=lists)


class TextFormat(JsonSchemaFormat, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Body, frozen=True, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    context: str | None = None  # no effect: which earlier thoughts the model sees is the chat template's choice


class ResponsesRequest(Conversation, frozen=True, kw_only=True):
    """POST /v1/responses."""

    NOT_SERVED = Generation.NOT_SERVED | {
        "conversation": (),
        "prompt": (),
        "n": (1,),
        "best_of": (0, 1),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
    }

    input: str | Annotated[list[InputItem], items(1)]
    instructions: str | None = None
    max_output_tokens: Length | None = None
    max_tool_calls: int | None = None  # no effect: it limits tools that run on the server, of which there are none
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | JsonObject | None = None
    prompt: JsonObject | None = None
    client_metadata: JsonObject | None = None  # Codex's, no effect
    # beyond OpenAI
    enable_response_messages: bool | None = None  # return the tokens of prompt and answer


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Return the chat request with the same meaning. RequestError if a field is invalid or not served."""
    refuse_unserved(body)
    if body.max_output_tokens is not None:
        LENGTH.check("max_output_tokens", body.max_output_tokens)
    choice = body.tool_choice
    same: dict[str, Any] = {name: getattr(body, name) for name in Conversation.__struct_fields__}
    same["response_format"] = _response_format(body)
    return ChatRequest(
        **same,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        tools=list(_chat_tools(body)) or None,
        tool_choice=choice.to_chat() if isinstance(choice, ResponseToolChoice) else choice,
        logprobs=bool(body.top_logprobs) or LOGPROBS in (body.include or ()),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def tools_of(body: ResponsesRequest) -> list[ResponseTool]:
    """Return the tools of a request: those of `tools`, then those of its input items. An item's tool replaces earlier
    ones of the same name, since a conversation may change its tools."""
    if isinstance(body.input, str):
        return list(body.tools or ())
    further = {(tool.type, tool.name): tool for item in body.input for tool in item.tools or ()}
    return [*(tool for tool in body.tools or () if (tool.type, tool.name) not in further), *further.values()]


def without_input(body: ResponsesRequest) -> ResponsesRequest:
    """Return the request with all its tools in `tools` and an empty input."""
    return msgspec.structs.replace(body, input="", tools=tools_of(body) or body.tools)


def tool_names(body: ResponsesRequest) -> dict[str, JsonObject]:
    """Return, for tools in namespaces, the name that the model writes → the fields of a call that name the tool: its
    name and its namespace."""
    members = (member for tool in tools_of(body) for member in tool.members())
    return {flat_name(space, each.name): {"name": each.name, "namespace": space} for space, each in members if space}


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a tool: NAMESPACE__NAME, or NAME without a namespace or in
    `functions`."""
    return f"{namespace.rstrip('_')}__{name}" if namespace and namespace != PLAIN else name


def _chat_tools(body: ResponsesRequest) -> Iterator[Tool]:
    """Yield the tools in a chat's form. RequestError if a tool of a namespace gets the same name as an earlier tool, or
    if a namespace contains a namespace."""
    seen = set[str]()
    for namespace, tool in (member for each in tools_of(body) for member in each.members()):
        name = flat_name(namespace, tool.name)
        if tool.type == "namespace" or (namespace and name in seen):
            why = "is a namespace" if tool.type == "namespace" else f"is {name!r:.80} to the model, as another tool is"
            raise RequestError(f"tools: {tool.name!r:.80} in {namespace!r:.80} {why}: leave it out or rename it")
        seen.add(name)
        custom = CustomTool(name=name, description=tool.description, format=tool.format)
        yield Tool(type=tool.type, function=msgspec.structs.replace(tool, name=name), custom=custom)


def schema_field(body: ResponsesRequest) -> str:
    """Return the name of the field with the answer's schema, for errors."""
    in_text = body.text is not None and body.text.format is not None
    return "text.format.schema" if in_text else "response_format.json_schema.schema"


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return body.response_format
    is_empty = form.schema is None and form.type != "json_schema"
    return ResponseFormat(type=form.type, json_schema=None if is_empty else {"schema": form.schema})


def _messages(body: ResponsesRequest) -> list[Message]:
    """Return `instructions`, as the system message, and the input as chat messages. The items of one answer are merged:
    a tool call into the text or call before it, reasoning into the item after it. RequestError if the input is empty or
    an item is invalid."""
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    if not body.input:
        raise RequestError("input is empty: give a text or at least one item")
    thought: str | None = None  # reasoning that belongs to the next item
    for position, item in enumerate(body.input):
        where = f"input[{position}]"
        if item.type == "additional_tools":
            continue
        if item.type == "reasoning":
            thought = content_of(f"{where}.content", item.content)[1]
            continue
        message = _message(where, item)
        if message.role == "assistant":
            if message.tool_calls and thought is None and messages and messages[-1].role == "assistant":
                calls = [*(messages[-1].tool_calls or ()), *message.tool_calls]
                messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=calls)
                continue
            message = msgspec.structs.replace(message, reasoning=thought)
        messages.append(message)
        thought = None
    return messages


def _message(where: str, item: InputItem) -> Message:
    """Return the message for an item other than reasoning; RequestError if it is invalid."""
    if item.type in ("function_call", "custom_tool_call"):
        call = FunctionCall(name=flat_name(item.namespace, item.name or ""), arguments=item.arguments, input=item.input)
        return Message(role="assistant", tool_calls=[ToolCall(id=item.call_id, function=call)])
    if item.type in ("function_call_output", "custom_tool_call_output"):
        text, _ = content_of(f"{where}.output", item.output)
        return Message(role="tool", content=text, tool_call_id=item.call_id)
    if item.role is None or item.content is None:
        raise RequestError(f"{where} needs role and content")
    return Message(role=item.role, content=content_of(f"{where}.content", item.content)[0])
