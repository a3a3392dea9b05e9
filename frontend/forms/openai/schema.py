"""Define the bodies of HTTP requests: OpenAI's fields and further ones under vLLM's names.

A null field counts as absent. `params.py` converts fields to SamplingParams and refuses fields that the engine does not
support.

The ranges in the types are only for /openapi.json (`http/openapi.py`); decoding ignores them. SamplingParams, endpoints
and input processor check the values, since their errors name a remedy. schemathesis compares schema and checks in both
directions (`tests/system/test_http_tools.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.params.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGITS_PROCESSORS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from .parts import MessagePart, Sent

CUSTOM_INPUT = "input"  # the argument of a custom tool
TOKEN_ID = "token id"  # title of integers below the vocabulary size of the loaded model


def within(low: float, high: float) -> Meta:
    return Meta(extra_json_schema={"minimum": low, "maximum": high})


def items(least: int = 0, most: int | None = None) -> Meta:
    return Meta(extra_json_schema={"minItems": least} | ({} if most is None else {"maxItems": most}))


def matching(pattern: str) -> Meta:
    return Meta(extra_json_schema={"pattern": pattern})


MAX_PROMPTS = 2048  # per request; OpenAI's limit
MAX_ID_CHARACTERS = 200
MOST = 2**31 - 1
Natural: TypeAlias = Annotated[int, within(0, MOST)]
TokenId: TypeAlias = Annotated[int, within(0, MOST), Meta(title=TOKEN_ID)]
Length: TypeAlias = Annotated[int, within(1, MOST)]  # of an answer; 0, only to score the prompt, is not served
Truncation: TypeAlias = Annotated[
    int, Meta(extra_json_schema={"anyOf": [{"const": -1}, {"minimum": 1, "maximum": MOST}]})
]
Text: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
Word: TypeAlias = Annotated[str, matching(r"\S")]
RequestId: TypeAlias = Annotated[str, matching(rf"^[ -.0-~]{{1,{MAX_ID_CHARACTERS}}}$")]
Salt: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_SALT_CHARACTERS})]
Bias: TypeAlias = dict[Annotated[str, matching("^[0-9]+$")], Annotated[float, within(-100, 100)]]

_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MOST, "title": TOKEN_ID}}
_PROMPTS = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"anyOf": [{"type": "string"}, _IDS]}}
_FORMS = [{"type": "string"}, _IDS, _PROMPTS]
Prompts: TypeAlias = Annotated[  # one prompt as text or ids, or a list of prompts
    str | list[str | int | list[int]], Meta(extra_json_schema={"allOf": [{"anyOf": _FORMS}]})
]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies. Without --strict-fields, unknown fields are removed before decoding, with a warning."""

    NOT_SERVED: ClassVar[dict[str, tuple[object, ...]]] = {}  # unsupported fields, and the values that make them no-ops


class StreamOptions(Body, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in every chunk
    include_obfuscation: bool | None = None  # OpenAI's padding against traffic analysis; none is sent


class JsonSchemaFormat(Body, frozen=True, kw_only=True):
    name: str = "schema"
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


_SCHEMAS = ("json_schema", "schema", "value")
_CONSTRAINTS: dict[str, tuple[str, ...]] = {  # fields of a ResponseFormat by its type
    "text": (),
    **dict.fromkeys(("json_object", "json_schema", "json"), _SCHEMAS),
    **{name: ("value", field) for name, field in (("regex", "pattern"), ("grammar", "grammar"))},
}


class ResponseFormat(Body, frozen=True, kw_only=True):
    """Form of an answer, in the spellings of OpenAI, TGI (`value`), llama.cpp, Together and Fireworks (`schema`,
    `pattern`, `grammar`) and Cohere (a schema directly in `json_schema`)."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: JsonObject | None = None  # {name, description, schema, strict}, or the schema itself
    schema: JsonObject | None = None
    value: JsonObject | str | None = None
    pattern: str | None = None
    grammar: str | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def constraints(self) -> Iterator[tuple[str, str, object]]:
        """Yield (field, kind, value) for each constraint, with the kinds of StructuredOutputsParams.

        RequestError if the type does not use a given field, or lacks the field that it needs."""
        kind, is_free = self.type if self.type in ("regex", "grammar") else "json", True
        for name in ("json_schema", "schema", "value", "pattern", "grammar"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in _CONSTRAINTS[self.type]:
                raise RequestError(
                    f"response_format.{name} has no effect with the type {self.type}: leave it out, or give its type"
                )
            if name == "json_schema" and value.keys() <= {"name", "description", "schema", "strict"}:
                name, value = "json_schema.schema", value.get("schema")
            if value is not None:
                is_free = False
                yield f"response_format.{name}", kind, value
        if is_free and self.type == "json_object":
            yield "response_format", "json_object", True
        elif is_free and self.type != "text":
            name = {"json_schema": "json_schema.schema"}.get(self.type, _CONSTRAINTS[self.type][-1])
            raise RequestError(f"response_format.{name} is missing, which the type {self.type} needs: give it")


class Scheduled(Body, frozen=True, kw_only=True):
    """Base with the fields that most endpoints share: for model, truncation, scheduling and caching."""

    model: str | None = None
    user: str | None = None
    # beyond OpenAI
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: Salt | None = None
    request_id: RequestId | None = None


class Generation(Scheduled, frozen=True, kw_only=True):
    """Fields of completions, chats and responses."""

    NOT_SERVED = {"use_beam_search": (False,), "length_penalty": (1,)}

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Text], items(0, MAX_STOP_STRINGS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    response_format: ResponseFormat | None = None
    # beyond OpenAI
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[Natural], items(0, MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Annotated[list[TokenId], items(0, MAX_LOGPROB_TOKEN_IDS)] | None = None
    thinking_token_budget: int | None = None
    allowed_token_ids: Annotated[list[TokenId], items(1)] | None = None
    bad_words: Annotated[list[Word], items(0, MAX_BAD_WORDS)] | None = None
    logits_processors: Annotated[list[Word], items(0, MAX_LOGITS_PROCESSORS)] | None = None
    vllm_xargs: JsonObject | None = None  # arguments of the logits processors
    repetition_detection: JsonObject | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # tokens of logprobs are written token_id:ID
    structured_outputs: JsonObject | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: JsonObject | None = None  # llama.cpp's
    grammar: str | None = None  # llama.cpp's
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """POST /v1/completions."""

    NOT_SERVED = Generation.NOT_SERVED | {"suffix": ("",)}

    prompt: Prompts  # one prompt as text or ids, or a list of prompts
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class FunctionCall(Sent, frozen=True, kw_only=True):
    name: str
    arguments: str | JsonObject | None = None
    input: str | None = None  # in place of arguments, for a custom tool


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """Base of structs that have a tool in the field named by `type`. RequestError if the tool in a Body has no name."""

    def __post_init__(self) -> None:
        if isinstance(self, Body) and (kind := getattr(self, "type", "")) != "allowed_tools" and not self.called.name:
            raise RequestError(f"{getattr(self, 'FIELD', 'tool_choice')}: type {kind} must have {kind}.name: give it")

    @property
    def called(self) -> Any:
        """The tool: the field `custom` if that is the type, otherwise `function`."""
        return getattr(self, "custom" if getattr(self, "type", "") == "custom" else "function")


class ToolCall(Called, Sent, frozen=True, kw_only=True):
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCall = FunctionCall(name="")
    custom: FunctionCall = FunctionCall(name="")
    index: int | None = None


class Message(Sent, frozen=True, kw_only=True):
    """Message of a chat. The template interprets the role; `developer`, OpenAI's newer name, becomes system."""

    role: str
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name
    thinking: str | None = None  # the name in gpt-oss's template
    refusal: str | None = None
    annotations: list[JsonObject] | None = None
    audio: JsonObject | None = None
    function_call: FunctionCall | None = None  # the older form of one tool call; its result has the role `function`


class Function(Body, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @property
    def schema(self) -> JsonObject:
        """The JSON schema of the arguments."""
        return self.parameters or {"type": "object", "properties": {}}


class CustomFormat(Body, frozen=True, kw_only=True):
    """Form of a custom tool's text. In a chat the grammar is in `grammar`, in a response in the other fields."""

    type: Literal["text", "grammar"] = "grammar"
    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""
    grammar: CustomFormat | None = None


class CustomTool(Function, frozen=True, kw_only=True):
    """Tool that takes a text. For the model it is a function with one argument."""

    format: CustomFormat | None = None

    @property
    def constraint(self) -> dict[str, object]:
        """The structured_outputs for the tool's input; {} if it may be any text. RequestError if a grammar has no
        syntax or no definition."""
        if self.format is None or self.format.type == "text":
            return {}
        given = self.format.grammar or self.format
        if given.syntax is None or not given.definition:
            raise RequestError(f"tools: the grammar of {self.name!r:.80} needs syntax and definition: give both")
        return {"grammar" if given.syntax == "lark" else "regex": given.definition}

    @property
    def schema(self) -> JsonObject:
        text: JsonObject = {"type": "string"}
        for kind, definition in self.constraint.items():
            text["description"] = f"Text that meets this {kind}:\n{definition}"
            text |= {"pattern": f"^(?:{definition})$"} if kind == "regex" else {}
        return {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}


class Tool(Called, Body, frozen=True, kw_only=True):
    FIELD: ClassVar = "tools"
    LEFT_OUT: ClassVar = "(?!(?:function|custom)$).*"  # tools that the server would run
    type: Literal["function", "custom"] = "function"
    function: Function = Function(name="")
    custom: CustomTool = CustomTool(name="")


class NamedFunction(Body, frozen=True, kw_only=True):
    name: str


class AllowedTool(Called, Body, frozen=True, kw_only=True):
    type: Literal["function", "custom"] = "function"
    function: NamedFunction = NamedFunction(name="")
    custom: NamedFunction = NamedFunction(name="")


class AllowedTools(Body, frozen=True, kw_only=True):
    """Tools that may be called; with mode `required`, one of them must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], items(1)]


class NamedTool(Called, Body, frozen=True, kw_only=True):
    """The tool that must be called, or a list of allowed tools. Some clients of other servers leave out the type."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    function: NamedFunction = NamedFunction(name="")
    custom: NamedFunction = NamedFunction(name="")
    allowed_tools: AllowedTools | None = None


class Conversation(Generation, frozen=True, kw_only=True):
    """Fields of chats and responses."""

    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # beyond OpenAI
    chat_template_kwargs: JsonObject | None = None
    include_reasoning: bool | None = None


class AnyChat(Conversation, frozen=True, kw_only=True):
    """Fields of single and batched chats."""

    NOT_SERVED = Generation.NOT_SERVED | {
        "modalities": ([], ["text"]),
        "audio": (),
    }

    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedTool | None = None  # any: Mistral's name of required
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    prediction: JsonObject | None = None
    audio: JsonObject | None = None
    functions: list[Function] | None = None  # this and the next: older forms of tools and tool_choice
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    # beyond OpenAI
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # answers start with the last message, if its role is assistant
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    documents: list[JsonObject] | None = None


class ChatRequest(AnyChat, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], items(1)]


class BatchChatRequest(AnyChat, frozen=True, kw_only=True):
    """POST /v1/chat/completions/batch."""

    NOT_SERVED = AnyChat.NOT_SERVED | {
        "stream": (False,),
        "n": (1,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "prompt_logprobs": (),
    }

    messages: Annotated[list[Annotated[list[Message], items(1)]], items(1, MAX_PROMPTS)]  # several chats

    @property
    def chats(self) -> list[ChatRequest]:
        shared = {name: getattr(self, name) for name in AnyChat.__struct_fields__}
        return [ChatRequest(messages=each, **shared) for each in self.messages]


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], items(1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None  # null: with a text, but not with a chat
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /detokenize: token ids to text."""

    model: str | None = None
    tokens: list[Natural]


class AbortRequest(Body, frozen=True, kw_only=True):
    """POST /abort with the id of an answer of any endpoint, such as cmpl-…, chatcmpl-…, resp_… or msg_…."""

    request_id: str
