"""Define the bodies of /v1/messages and /v1/messages/count_tokens and rewrite them as chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.params.sampling_params import MAX_STOP_STRINGS
from ..openai import schema as openai
from ..openai.params import refuse_unserved
from ..openai.parts import MessagePart, Sent, content_of, refuse_left_out
from ..openai.schema import ChatRequest, Message, Scheduled, TokenizeRequest

BILLING = "x-anthropic-billing-header"  # start of a block of Claude Code's that differs in each request: left out
_CALLS = ("tool_use", "tool_result")
_CHOICES: dict[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}
_SAME = (*Scheduled.__struct_fields__, "stream", "temperature", "top_p", "top_k", "vllm_xargs")  # equal in a chat


class ResultPart(MessagePart, frozen=True, kw_only=True):
    """Part of a tool's result."""

    LEFT_OUT: ClassVar = "tool_reference"  # result of a search for tools, which is left out too

    def __post_init__(self) -> None:
        refuse_left_out(self.type, self.LEFT_OUT)


class Block(MessagePart, frozen=True, kw_only=True):
    """Text, thinking, image, document, tool call or tool result. Blocks of other types are decoded too, so that an
    error can name the type."""

    LEFT_OUT: ClassVar = r"server_tool_use|mcp_tool_use|.+_tool_result|container_upload|compaction"

    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None

    def __post_init__(self) -> None:
        refuse_left_out(self.type, self.LEFT_OUT)


class Turn(Sent, frozen=True, kw_only=True):
    LEFT_OUT: ClassVar = ""  # some blocks are left out, but turns never

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(Sent, frozen=True, kw_only=True):
    """Function of the caller. Anthropic's own tools, which only its models know, are left out."""

    LEFT_OUT: ClassVar = "(?!custom$).*"

    name: str
    input_schema: JsonObject
    description: str | None = None
    type: Literal["custom"] | None = None


class MessageToolChoice(Sent, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(Sent, frozen=True, kw_only=True):
    """Switch for reasoning, passed to the chat template, and limit of reasoning tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Sent, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(Sent, frozen=True, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Scheduled, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: the fields that determine the prompt."""

    messages: Annotated[list[Turn], openai.items(1)]
    system: str | list[MessagePart] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of output_config.format
    cache_control: JsonObject | None = None  # prefixes are always cached
    context_management: JsonObject | None = None
    speed: str | None = None
    # beyond Anthropic
    chat_template_kwargs: JsonObject | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: openai.Length
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[openai.Text], openai.items(0, MAX_STOP_STRINGS)] | None = None
    metadata: JsonObject | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    # beyond Anthropic
    vllm_xargs: JsonObject | None = None


def chat_request(body: MessagesRequest) -> ChatRequest:
    """Return the chat request with the same meaning. RequestError if a field is invalid or not served."""
    fields = {name: getattr(body, name) for name in _SAME} | _prompt(body)
    if body.tool_choice is not None:
        function, choice = openai.NamedFunction(name=body.tool_choice.name), _CHOICES.get(body.tool_choice.type)
        fields["tool_choice"] = choice or openai.NamedTool(type="function", function=function)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None and body.thinking.type == "enabled":
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    form = body.output_format
    if body.output_config is not None:
        if form is not None and body.output_config.format not in (None, form):
            raise RequestError("output_format and output_config.format differ: give one")
        form = body.output_config.format or form
    if form is not None:
        fields["response_format"] = openai.ResponseFormat(type="json_schema", json_schema={"schema": form.schema})
    return ChatRequest(**fields, max_tokens=body.max_tokens, stop=body.stop_sequences)


def schema_field(body: MessagesRequest) -> str:
    """Return the name of the field with the answer's schema, for errors."""
    is_new = body.output_config is not None and body.output_config.format is not None
    return "output_config.format.schema" if is_new else "output_format.schema"


def tokenize_request(body: CountTokensRequest) -> TokenizeRequest:
    """Return the request to /tokenize that counts the prompt. RequestError if a field of the prompt is invalid or not
    served."""
    return TokenizeRequest(**_prompt(body))


def _prompt(body: CountTokensRequest) -> dict[str, Any]:
    """Return the fields of the prompt, which ChatRequest and TokenizeRequest share. RequestError if one is invalid or
    not served."""
    refuse_unserved(body)
    if body.system is not None and not body.messages:
        raise RequestError("messages is empty: give at least one")
    turns = [*_system(body.system), *(each for place, turn in enumerate(body.messages) for each in _turns(place, turn))]
    variables: JsonObject = {}
    if body.thinking is not None:  # under the names of Qwen's and DeepSeek's templates
        variables = dict.fromkeys(("enable_thinking", "thinking"), body.thinking.type != "disabled")
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    is_hidden = body.tool_choice is not None and body.tool_choice.type == "none"
    functions = [
        openai.Function(name=each.name, description=each.description, parameters=each.input_schema)
        for each in (() if is_hidden else body.tools or ())
    ]
    return {
        "messages": turns,
        "tools": [openai.Tool(type="function", function=each) for each in functions] or None,
        "continue_final_message": bool(turns) and turns[-1].role == "assistant" and not turns[-1].tool_calls,
        "chat_template_kwargs": variables | (body.chat_template_kwargs or {}),
    }


def _system(given: str | list[MessagePart] | None) -> Iterator[Message]:
    if isinstance(given, list):
        given = [block for block in given if not (block.text or "").startswith(BILLING)]
    if given:
        yield Message(role="system", content=content_of("system", given)[0])


def _turns(place: int, turn: Turn) -> Iterator[Message]:
    """Yield the chat messages of a turn: one per tool result, then one for the rest, unless it has only results.
    RequestError if a block is invalid."""
    blocks: list[Block] = [] if isinstance(turn.content, str) else turn.content
    where, calls = f"messages[{place}].content", list[openai.ToolCall]()
    for position, block in enumerate(blocks):
        if block.type == "tool_use":
            if not block.name:
                raise RequestError(f"{where}[{position}] is a tool_use without a name: give it one")
            function = openai.FunctionCall(name=block.name, arguments=block.input)
            calls.append(openai.ToolCall(id=block.id, function=function))
        elif block.type == "tool_result":
            content, _ = content_of(f"{where}[{position}].content", block.content)
            yield Message(
                role="tool", content=_as_error(content) if block.is_error else content, tool_call_id=block.tool_use_id
            )
    if not blocks or any(block.type != "tool_result" for block in blocks):
        content, thought = content_of(where, turn.content, besides=_CALLS)
        yield Message(role=turn.role, content=content, reasoning=thought, tool_calls=calls or None)


def _as_error(content: str | list[MessagePart]) -> str | list[MessagePart]:
    """Return the content of a failed tool's result with "Error: " before it."""
    if isinstance(content, str):
        return f"Error: {content}"
    first, *others = content or [MessagePart(type="text")]
    if first.type != "text":
        return [MessagePart(type="text", text="Error: "), first, *others]
    return [MessagePart(type="text", text=f"Error: {first.text or ''}"), *others]
