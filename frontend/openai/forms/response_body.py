"""The body of /v1/responses, and the chat that it is rewritten as."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.sampling_params import MAX_STOP_STRINGS, RANGES
from .messages import content_of
from .schema import (
    Body,
    ChatRequest,
    Function,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    RequestId,
    ResponseFormat,
    Sent,
    Text,
    TextPart,
    Tool,
    ToolCall,
    items,
)


class InputItem(Sent, frozen=True, kw_only=True):
    """A message, a call of a function, its output, or the reasoning of an earlier answer, which is left out."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | JsonObject | None = None
    output: str | list[TextPart] | None = None


class ResponseTool(Function, frozen=True, kw_only=True):
    """A function; here its fields stand beside the type."""

    type: Literal["function"]


class ResponseToolName(NamedFunction, frozen=True, kw_only=True):
    type: Literal["function"]


class TextFormat(JsonSchemaFormat, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Body, frozen=True, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Body, frozen=True, kw_only=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], items(1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolName | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # beyond OpenAI
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: Text | Annotated[list[Text], items(0, MAX_STOP_STRINGS)] | None = None
    priority: int | None = None
    request_id: RequestId | None = None


_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "priority", "request_id", "parallel_tool_calls")


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The chat that a request is."""
    if body.background or body.previous_response_id is not None:
        name = "background" if body.background else "previous_response_id"
        raise RequestError(f"{name} is not served: nothing is stored here, send the whole conversation as input")
    tools = [
        Tool(
            type="function", function=Function(name=each.name, description=each.description, parameters=each.parameters)
        )
        for each in body.tools or ()
    ]
    if body.max_output_tokens is not None:
        RANGES["max_tokens"].check("max_output_tokens", body.max_output_tokens)
    choice = body.tool_choice
    same: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    return ChatRequest(
        **same,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        tools=tools or None,
        tool_choice=NamedTool(type="function", function=NamedFunction(name=choice.name))
        if isinstance(choice, ResponseToolName)
        else choice,
        response_format=_response_format(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    form = None if text is None else text.format
    if form is None:
        return None
    schema = JsonSchemaFormat(name=form.name, schema=form.schema) if form.type == "json_schema" else None
    return ResponseFormat(type=form.type, json_schema=schema)


def _messages(body: ResponsesRequest) -> list[Message]:
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    if not body.input:
        raise RequestError("input is empty: give a text or at least one item")
    for position, item in enumerate(body.input):
        if item.type == "function_call":
            call = FunctionCall(name=item.name or "", arguments=item.arguments)
            messages.append(Message(role="assistant", tool_calls=[ToolCall(id=item.call_id, function=call)]))
        elif item.type == "function_call_output":
            messages.append(
                Message(
                    role="tool",
                    content=content_of(f"input[{position}].output", item.output)[0],
                    tool_call_id=item.call_id,
                )
            )
        elif item.type == "message":
            if item.role is None or item.content is None:
                raise RequestError(f"input[{position}] needs role and content")
            messages.append(Message(role=item.role, content=content_of(f"input[{position}].content", item.content)[0]))
    return messages
