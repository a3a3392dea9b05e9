"""/v1/responses: OpenAI's newer form of a chat, made of the same parts: input items in, output items out.

A request is rewritten as a chat; its answer's pieces become items (reasoning, message, function calls), each opened,
filled and closed by events. Nothing is stored: a conversation goes on by sending its items again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec

from ..ipc.errors import RequestError
from ..ipc.sampling_params import MAX_STOP_STRINGS, RANGES
from .openai_chat import ChatCompletion
from .openai_errors import encode_json
from .openai_items import ItemWriter
from .openai_messages import text_of
from .openai_schema import (
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
    Text,
    Tool,
    ToolCall,
    items,
)
from .tokenizer import JsonObject


class TextItem(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message; what an earlier answer's part has beside text (annotations, logprobs) is left out."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message, a call of a function, its output, or the reasoning of an earlier answer, which is left out."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = None
    content: str | list[TextItem] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


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


class ResponseCreation:
    """One request to the endpoint, which `chat` answers. `whole` or `events` is used once."""

    stream_end = b""

    def __init__(self, body: ResponsesRequest, model: str, chat: ChatCompletion) -> None:
        self._body = body
        self._model = model
        self._chat = chat
        self._created = int(time.time())
        self._id = "resp_" + chat.id.partition("-")[2]
        self._sequence = 0

    async def whole(self) -> bytes:
        last: JsonObject = {}
        async for kind, fields in self._progress():
            if kind in ("response.completed", "response.incomplete"):
                last = fields
        return encode_json(last["response"])

    async def events(self) -> AsyncGenerator[bytes, None]:
        async for kind, fields in self._progress():
            body = {"type": kind, "sequence_number": self._sequence, **fields}
            self._sequence += 1
            yield b"event: " + kind.encode() + b"\ndata: " + encode_json(body) + b"\n\n"

    async def _progress(self) -> AsyncGenerator[tuple[str, JsonObject], None]:
        """Every event in order, as (type, its fields)."""
        writer = ItemWriter(secrets.token_hex(12))
        with self._chat.run() as run:
            begun = False
            finish_reason: str | None = None
            async for pieces in self._chat.pieces(run):
                if not begun:
                    begun = True
                    yield "response.created", {"response": self._response("in_progress", [], None)}
                    yield "response.in_progress", {"response": self._response("in_progress", [], None)}
                for piece, delta in pieces:
                    finish_reason = delta.finish_reason or finish_reason
                    for event in writer.write(piece):
                        yield event
            for event in writer.close():
                yield event
            usage = _usage(run.usage())
            is_whole = finish_reason == "stop"
            response = self._response("completed" if is_whole else "incomplete", writer.items, usage)
            if not is_whole:
                reason = "max_output_tokens" if finish_reason == "length" else finish_reason
                response["incomplete_details"] = {"reason": reason}
            yield "response.completed" if is_whole else "response.incomplete", {"response": response}

    def _response(self, status: str, output: list[JsonObject], usage: JsonObject | None) -> JsonObject:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": output,
            "usage": usage,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": "disabled",
            "text": body.text or {"format": {"type": "text"}},
        }


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
            call = FunctionCall(name=item.name or "", arguments=item.arguments or "{}")
            messages.append(Message(role="assistant", tool_calls=[ToolCall(id=item.call_id, function=call)]))
        elif item.type == "function_call_output":
            messages.append(Message(role="tool", content=item.output or "", tool_call_id=item.call_id))
        elif item.type == "message":
            if item.role is None or item.content is None:
                raise RequestError(f"input[{position}] needs role and content")
            messages.append(Message(role=item.role, content=_content(f"input[{position}]", item.content)))
    return messages


def _content(where: str, content: str | list[TextItem]) -> str:
    return content if isinstance(content, str) else "\n".join(text_of(where, each.type, each.text) for each in content)


def _usage(usage: JsonObject) -> JsonObject:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
