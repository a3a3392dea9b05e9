"""Define the bodies of /v1/messages and /v1/messages/count_tokens and rewrite them as chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.params.sampling_params import MAX_STOP_STRINGS
from ..field import means, ours, unused
from ..openai.generation import Length, ResponseFormat, Scheduled, Text, items
from ..openai.params import refuse_unserved
from ..openai.parts import CacheControl, MessagePart, Sent, content_of, refuse_left_out
from ..openai.schema import QUESTION, ChatRequest, Message, TokenizeRequest
from ..openai.tools import Function, FunctionCall, NamedFunction, NamedTool, Tool, ToolCall
from .tool_use_ids import id_of_call

BILLING = "x-anthropic-billing-header"  # start of a block of Claude Code's that differs in each request: left out
_CALLS = ("tool_use", "tool_result")
_CHOICES: dict[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}
_SAME = (  # equal in a chat
    *(*Scheduled.__struct_fields__, "stream", "include_cache_report"),
    *("temperature", "top_p", "top_k", "vllm_xargs"),
)


class ResultPart(MessagePart, frozen=True, kw_only=True):
    """Part of a tool's result."""

    LEFT_OUT: ClassVar = "tool_reference"  # result of a search for tools, which is left out too

    def __post_init__(self) -> None:
        refuse_left_out(self.type, self.LEFT_OUT)


class Block(MessagePart, frozen=True, kw_only=True):
    """Text, thinking, image, document, tool call or tool result. Blocks of other types are decoded too, so that an
    error can name the type, except for the types of LEFT_OUT."""

    LEFT_OUT: ClassVar = r"server_tool_use|mcp_tool_use|.+_tool_result|container_upload|compaction"

    id: Annotated[str | None, means("Id of a tool call.")] = None
    name: Annotated[str | None, means("Name of the called tool.")] = None
    input: Annotated[JsonObject | None, means("Arguments of a tool call.")] = None
    tool_use_id: Annotated[str | None, means("Id of the call whose result this is.")] = None
    content: Annotated[str | list[ResultPart] | None, means("Content of a tool's result.")] = None
    is_error: Annotated[bool | None, means("Whether the tool failed.", False)] = None

    def __post_init__(self) -> None:
        refuse_left_out(self.type, self.LEFT_OUT)


class Turn(Sent, frozen=True, kw_only=True):
    """Turn of a conversation."""

    LEFT_OUT: ClassVar = ""  # some blocks are left out, but turns never

    role: Annotated[Literal["user", "assistant", "system"], means("Who says it.")]
    content: Annotated[str | list[Block], means("The text, or a list of blocks: text, images, calls and results.")]


class MessageTool(Sent, frozen=True, kw_only=True):
    """Function of the caller. Anthropic's own tools, which only its models know, are left out."""

    LEFT_OUT: ClassVar = "(?!custom$).*"

    name: Annotated[str, means("Name of the tool, which a call repeats.")]
    input_schema: Annotated[JsonObject, means("JSON schema of its arguments.")]
    description: Annotated[str | None, means("What the tool does, for the model to read.", "none")] = None
    type: Annotated[Literal["custom"] | None, means("A tool of the caller.", "custom")] = None
    cache_control: Annotated[CacheControl | None, means("Keep the prompt cached.", "not kept")] = None
    strict: Annotated[
        bool | None, means("Calls satisfy the schema even if none is forced; forced ones always do.", False)
    ] = None


class MessageToolChoice(Sent, frozen=True, kw_only=True):
    """Whether the model may, must or must not call a tool."""

    type: Annotated[Literal["auto", "any", "tool", "none"], means("It may; it must call any; the named one; none.")]
    name: Annotated[str, means("Name of the tool, if the type is tool.")] = ""
    disable_parallel_tool_use: Annotated[bool | None, means("Allow one call at most.", False)] = None


class Thinking(Sent, frozen=True, kw_only=True):
    """Switch for reasoning, passed to the chat template, and limit of reasoning tokens."""

    type: Annotated[Literal["enabled", "disabled", "adaptive"], means("Whether the model thinks before it answers.")]
    budget_tokens: Annotated[int | None, means("Tokens of reasoning after which its end is forced.", "no limit")] = None


class OutputFormat(Sent, frozen=True, kw_only=True):
    """Form of an answer."""

    type: Annotated[Literal["json_schema"], means("JSON that satisfies a schema.")]
    schema: Annotated[JsonObject, means("The JSON schema.")]


class OutputConfig(Sent, frozen=True, kw_only=True):
    """Settings of an answer."""

    effort: Annotated[
        str | None, means("How long the model is to think, for chat templates that read it.", "the template's")
    ] = None
    format: Annotated[OutputFormat | None, means("The form that the answer must have.", "free text")] = None


class CountTokensRequest(Scheduled, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: the fields that determine the prompt."""

    EXAMPLE: ClassVar[JsonObject] = {"messages": [QUESTION]}

    messages: Annotated[list[Turn], items(1), means("The conversation so far; the answer is its next turn.")]
    system: Annotated[str | list[MessagePart] | None, means("The system prompt.", "none")] = None
    tools: Annotated[list[MessageTool] | None, means("Tools that the model may call.", "none")] = None
    tool_choice: Annotated[
        MessageToolChoice | None, means("Whether tools may, must or must not be called.", "they may")
    ] = None
    thinking: Annotated[
        Thinking | None, means("Whether and how long the model thinks first.", "as the chat template does")
    ] = None
    output_config: Annotated[OutputConfig | None, means("Form of the answer, and effort.", "free text")] = None
    output_format: Annotated[OutputFormat | None, means("The older place of output_config.format.", "free text")] = None
    cache_control: Annotated[
        CacheControl | None, means("Keep the prompt cached; it is cached in any case, while there is room.", "not kept")
    ] = None
    context_management: Annotated[JsonObject | None, unused("Anthropic's clearing of old turns.")] = None
    speed: Annotated[str | None, unused("Anthropic's tier of speed.")] = None
    # beyond Anthropic
    chat_template_kwargs: Annotated[
        JsonObject | None, ours("Variables for the chat template.", "those of the operator")
    ] = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """POST /v1/messages."""

    EXAMPLE: ClassVar = {"max_tokens": 50, "messages": [QUESTION], "temperature": 0}

    max_tokens: Annotated[Length, means("The longest answer, in tokens, with its reasoning.")]
    stream: Annotated[
        bool | None, means("Send the answer piece by piece, as server-sent events, while it is made.", False)
    ] = None
    include_cache_report: Annotated[
        bool | None,
        ours("Say in the usage which tokens of the prompt were not found in the prefix cache, and why.", False),
    ] = None
    temperature: Annotated[
        float | None, means("How freely tokens are drawn: 0 always takes the likeliest. Anthropic: up to 1.")
    ] = None
    top_p: Annotated[
        float | None, means("Draw only from the likeliest tokens whose probabilities first reach this sum.")
    ] = None
    top_k: Annotated[int | None, means("Draw only from this many of the likeliest tokens; 0 or -1: from all.")] = None
    stop_sequences: Annotated[
        Annotated[list[Text], items(0, MAX_STOP_STRINGS)] | None, means("Texts at which the answer ends.", "none")
    ] = None
    metadata: Annotated[JsonObject | None, unused("Notes of the caller on the request.")] = None
    inference_geo: Annotated[str | None, unused("The country in which Anthropic computes.")] = None
    # beyond Anthropic
    vllm_xargs: Annotated[JsonObject | None, ours("Arguments of the logits processors.", "none")] = None


def chat_request(body: MessagesRequest) -> ChatRequest:
    """Return the chat request with the same meaning. RequestError if a field is invalid or not served."""
    fields = {name: getattr(body, name) for name in _SAME} | _prompt(body)
    if body.tool_choice is not None:
        function, choice = NamedFunction(name=body.tool_choice.name), _CHOICES.get(body.tool_choice.type)
        fields["tool_choice"] = choice or NamedTool(type="function", function=function)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None and body.thinking.type == "enabled":
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    form = body.output_format
    if body.output_config is not None:
        if form is not None and body.output_config.format not in (None, form):
            raise RequestError("output_format and output_config.format differ: give one")
        form = body.output_config.format or form
    if form is not None:
        fields["response_format"] = ResponseFormat(type="json_schema", json_schema={"schema": form.schema})
    fields["prompt_cache_retention"] = retention_of(body)
    return ChatRequest(**fields, max_tokens=body.max_tokens, stop=body.stop_sequences)


def retention_of(body: CountTokensRequest) -> str | None:
    """Return the longest time for which a cache_control asks; None without one. A prompt is kept as a whole."""
    turns = [turn.content for turn in body.messages]
    blocks = [block for content in (body.system, *turns) if isinstance(content, list) for block in content]
    controls = [each.cache_control for each in (body, *(body.tools or ()), *blocks)]
    times = {control.ttl or "5m" for control in controls if control is not None}
    return max(times, key=("5m", "1h").index, default=None)


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
        Function(name=each.name, description=each.description, parameters=each.input_schema, strict=each.strict)
        for each in (() if is_hidden else body.tools or ())
    ]
    return {
        "messages": turns,
        "tools": [Tool(type="function", function=each) for each in functions] or None,
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
    where, calls = f"messages[{place}].content", list[ToolCall]()
    for position, block in enumerate(blocks):
        if block.type == "tool_use":
            if not block.name:
                raise RequestError(f"{where}[{position}] is a tool_use without a name: give it one")
            function = FunctionCall(name=block.name, arguments=block.input)
            calls.append(ToolCall(id=id_of_call(block.id), function=function))
        elif block.type == "tool_result":
            content, _ = content_of(f"{where}[{position}].content", block.content)
            content = _as_error(content) if block.is_error else content
            yield Message(role="tool", content=content, tool_call_id=id_of_call(block.tool_use_id))
    if not blocks or any(block.type != "tool_result" for block in blocks):
        content, thought = content_of(where, turn.content, besides=_CALLS)
        if calls and not content:  # the API has no null
            yield Message(role=turn.role, reasoning=thought, tool_calls=calls)
        else:
            yield Message(role=turn.role, content=content, reasoning=thought, tool_calls=calls or None)


def _as_error(content: str | list[MessagePart]) -> str | list[MessagePart]:
    """Return the content of a failed tool's result with "Error: " before it."""
    if isinstance(content, str):
        return f"Error: {content}"
    first, *others = content or [MessagePart(type="text")]
    if first.type != "text":
        return [MessagePart(type="text", text="Error: "), first, *others]
    return [MessagePart(type="text", text=f"Error: {first.text or ''}"), *others]
