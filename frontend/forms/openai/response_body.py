"""Define the body of /v1/responses and rewrite it as a chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.params.sampling_params import LENGTH
from ..field import means, ours, unused
from .generation import Body, Generation, JsonSchemaFormat, Length, ResponseFormat, items
from .params import refuse_unserved
from .parts import MessagePart, Sent, content_of
from .schema import QUESTION, ROOM, ChatRequest, Conversation, Message
from .tools import (
    AllowedTool,
    AllowedTools,
    CustomFormat,
    CustomTool,
    Function,
    FunctionCall,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)

PLAIN = "functions"  # the namespace of tools without a namespace
LOGPROBS = "message.output_text.logprobs"  # value in `include` that asks for logprobs


class InputItem(Sent, frozen=True, kw_only=True):
    """Message, tool call, output of a call, reasoning of an earlier answer, or further tools, as Codex sends them."""

    # calls of tools that are left out too, and their outputs, which answers of other servers contain
    LEFT_OUT: ClassVar = (
        r"(?!(?:custom_tool|function)_call(?:_output)?$)(?:.+_call(?:_output)?|mcp_.+|tool_search_output|compaction.*)"
    )

    type: Annotated[
        Literal[
            "message",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "reasoning",
            "additional_tools",
        ],
        means("Kind of the item: a message, a call of a tool, its result, reasoning, or tools."),
    ] = "message"
    role: Annotated[str | None, means("Who says a message: system, developer, user or assistant.")] = None
    content: Annotated[str | list[MessagePart] | None, means("Text or parts of a message.")] = None
    call_id: Annotated[str | None, means("Id that joins a call and its result.")] = None
    name: Annotated[str | None, means("Name of the called tool.")] = None
    namespace: Annotated[str | None, means("Namespace of the called tool.", "none")] = None
    arguments: Annotated[str | JsonObject | None, means("Arguments of a function, as JSON text or an object.")] = None
    input: Annotated[str | None, means("Text for a custom tool.")] = None
    output: Annotated[str | list[MessagePart] | None, means("Result of a call.")] = None
    tools: Annotated[list[ResponseTool] | None, means("Tools of an item of type additional_tools.")] = None


class ResponseTool(Function, frozen=True, kw_only=True):
    """Function, custom tool, or namespace of such tools. The tool's fields are on one level with `type`; in a chat they
    are in an object that is named by the type."""

    LEFT_OUT: ClassVar = "(?!(?:function|custom|namespace)$).*"  # tools that the server would run

    type: Annotated[Literal["function", "custom", "namespace"], means("A function, a custom tool, or several tools.")]
    format: Annotated[CustomFormat | None, means("The form of a custom tool's text.", "any text")] = None
    tools: Annotated[list[ResponseTool] | None, means("The tools of a namespace.")] = None

    def members(self) -> Iterator[tuple[str | None, ResponseTool]]:
        """Yield (name of the namespace, tool) for each tool of a namespace, or (None, self) for a tool."""
        if self.type != "namespace":
            yield None, self
        for each in self.tools or () if self.type == "namespace" else ():
            yield self.name, each


class ResponseToolName(NamedFunction, frozen=True, kw_only=True, omit_defaults=True):
    """Tool that may be called, by its name."""

    type: Annotated[Literal["function", "custom"], means("Which of the two the tool is.")]
    namespace: Annotated[str | None, means("Namespace of the tool.", "none")] = None

    @property
    def in_chat(self) -> NamedFunction:
        return NamedFunction(name=flat_name(self.namespace, self.name))


class ResponseToolChoice(Body, frozen=True, kw_only=True, omit_defaults=True):
    """The tool that must be called, or a list of allowed tools."""

    type: Annotated[Literal["function", "custom", "allowed_tools"], means("What is chosen.")]
    name: Annotated[str, means("Name of the tool that must be called.")] = ""
    namespace: Annotated[str | None, means("Namespace of that tool.", "none")] = None
    mode: Annotated[Literal["auto", "required"], means("Whether an allowed tool may or must be called.")] = "auto"
    tools: Annotated[list[ResponseToolName] | None, means("The allowed tools.")] = None

    def to_chat(self) -> NamedTool:
        """Return this choice in the form of a chat's tool_choice."""
        named = NamedFunction(name=flat_name(self.namespace, self.name))
        allowed = [AllowedTool(type=each.type, function=each.in_chat, custom=each.in_chat) for each in self.tools or ()]
        lists = AllowedTools(mode=self.mode, tools=allowed) if self.type == "allowed_tools" else None
        return NamedTool(type=self.type, function=named, custom=named, allowed_tools=lists)


class TextFormat(JsonSchemaFormat, frozen=True, kw_only=True):
    """Form of a response's text."""

    type: Annotated[Literal["text", "json_object", "json_schema"], means("Free text, a JSON object, or a schema's.")]


class TextOptions(Body, frozen=True, kw_only=True):
    """Settings of a response's text."""

    format: Annotated[TextFormat | None, means("The form that the text must have.", "free text")] = None
    verbosity: Annotated[str | None, unused("How long answers are to be, for OpenAI's models.")] = None


class ReasoningOptions(Body, frozen=True, kw_only=True):
    """Settings of a response's reasoning."""

    effort: Annotated[
        str | None, means("How long the model is to think, for chat templates that read it.", "the template's")
    ] = None
    summary: Annotated[str | None, unused("OpenAI's summary of the reasoning; it is returned whole.")] = None
    context: Annotated[  # which earlier thoughts the model sees is the choice of the chat template
        str | None, unused("Which earlier thoughts the model sees.")
    ] = None


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

    EXAMPLE: ClassVar = {"input": QUESTION["content"], "max_output_tokens": 50, "temperature": 0, "store": False}

    input: Annotated[
        str | Annotated[list[InputItem], items(1)],
        means("The user's text, or a list of messages, calls and results of calls."),
    ]
    instructions: Annotated[str | None, means("The system message.", "none")] = None
    max_output_tokens: Annotated[Length | None, means("The longest answer and reasoning, in tokens.", ROOM)] = None
    max_tool_calls: Annotated[int | None, unused("It limits tools that run on the server; none do here.")] = None
    tools: Annotated[list[ResponseTool] | None, means("Tools that the model may call.", "none")] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ResponseToolChoice | None,
        means("Whether tools may, must or must not be called, or the one that must be.", "auto"),
    ] = None
    text: Annotated[TextOptions | None, means("The form of the text, such as JSON of a schema.", "free text")] = None
    reasoning: Annotated[ReasoningOptions | None, means("How long the model is to think.", "the template's")] = None
    include: Annotated[
        list[str] | None,
        means(f"What the response has beside the usual: {LOGPROBS}; others have no effect.", "nothing"),
    ] = None
    truncation: Annotated[str | None, unused("Inputs that are too long are refused here.")] = None
    store: Annotated[bool | None, means("Store the response, so that it can be read and continued.", True)] = None
    background: Annotated[
        bool | None, means("Answer at once with the id, and generate the response meanwhile.", False)
    ] = None
    previous_response_id: Annotated[
        str | None, means("Id of the stored response whose conversation this continues.", "a new conversation")
    ] = None
    conversation: Annotated[
        str | JsonObject | None, means("A conversation stored at OpenAI; previous_response_id does the same.")
    ] = None
    prompt: Annotated[JsonObject | None, means("A prompt stored at OpenAI; none are stored here.")] = None
    client_metadata: Annotated[JsonObject | None, unused("Notes of the client, which Codex sends.")] = None
    # beyond OpenAI
    enable_response_messages: Annotated[bool | None, ours("Return the tokens of prompt and answer, too.", False)] = None


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
    ones of the same type and name, since a conversation may change its tools."""
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
    """Return the name under which the model sees a tool: NAMESPACE__NAME (without underscores at the namespace's end),
    or NAME without a namespace or in `functions`."""
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
