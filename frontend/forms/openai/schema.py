"""Bodies of OpenAI's completions and chats, and of vLLM's endpoints for tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ....ipc.codec import JsonObject
from ..field import means, ours, unused
from .generation import MAX_PROMPTS, Body, Generation, Length, Natural, Prompts, items
from .parts import MessagePart, Sent
from .tools import Function, FunctionCall, NamedFunction, NamedTool, Tool, ToolCall

ROOM = "the model's default, or what the prompt leaves"  # for the longest answer
QUESTION: JsonObject = {"role": "user", "content": "What is the capital of France?"}


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """POST /v1/completions."""

    NOT_SERVED = Generation.NOT_SERVED | {"suffix": ("",)}
    EXAMPLE: ClassVar = {"prompt": "The capital of France is", "max_tokens": 20, "temperature": 0}

    prompt: Annotated[Prompts, means("The text to continue, or its token ids; or a list of several prompts.")]
    max_tokens: Annotated[int | None, means("The longest answer, in tokens; 0 only scores the prompt.")] = None
    echo: Annotated[bool | None, means("Begin each answer with its prompt.", False)] = None
    logprobs: Annotated[
        int | None, means("Return the logprobs of the tokens, and of this many likeliest alternatives.", "not returned")
    ] = None
    suffix: Annotated[str | None, means("Text behind the gap to fill, which no model here does by itself.")] = None
    add_special_tokens: Annotated[
        bool | None, ours("Put the special tokens around a text prompt that the tokenizer adds.", True)
    ] = None


class Message(Sent, frozen=True, kw_only=True):
    """Message of a chat. The template interprets the role; `developer`, OpenAI's newer name, becomes system."""

    role: Annotated[str, means("Who says it: system or developer, user, assistant, or tool for a tool's result.")]
    content: Annotated[
        str | list[MessagePart] | None, means("The text, or a list of parts: text, images, audio.", "an empty text")
    ] = None
    name: Annotated[str | None, means("Name of the speaker, or of the tool, if the template shows it.")] = None
    tool_calls: Annotated[list[ToolCall] | None, means("Calls that an answer of the assistant made.", "none")] = None
    tool_call_id: Annotated[str | None, means("Id of the call whose result a message of role tool is.")] = None
    reasoning: Annotated[str | None, means("The thoughts of an earlier answer, if the template shows them.")] = None
    reasoning_content: Annotated[str | None, means("The older name of reasoning.")] = None
    thinking: Annotated[str | None, means("The name of reasoning in gpt-oss's template.")] = None
    refusal: Annotated[str | None, means("What an answer of OpenAI's said in place of content.")] = None
    annotations: Annotated[list[JsonObject] | None, unused("Citations of an earlier answer.")] = None
    audio: Annotated[JsonObject | None, unused("Reference to spoken audio of an earlier answer.")] = None
    function_call: Annotated[
        FunctionCall | None, means("The older form of one call; its result has the role function.")
    ] = None


class Conversation(Generation, frozen=True, kw_only=True):
    """Fields of chats and responses."""

    top_logprobs: Annotated[
        int | None, means("Return the logprobs of this many likeliest alternatives of each token, too.", 0)
    ] = None
    parallel_tool_calls: Annotated[bool | None, means("Let an answer call several tools at once.", True)] = None
    metadata: Annotated[dict[str, str] | None, unused("Notes of the caller on the request.")] = None
    store: Annotated[bool | None, unused("Chats are not stored; responses are.")] = None
    safety_identifier: Annotated[str | None, unused("The end user, for OpenAI's checks.")] = None
    prompt_cache_key: Annotated[
        str | None, means("Requests with the same key go to the same replica, as far as its load allows.", "by prefix")
    ] = None
    prompt_cache_retention: Annotated[
        str | None,
        means("With 24h (5m, 1h), the prompt stays cached so long before others, within limits.", "in-memory"),
    ] = None
    # beyond OpenAI
    session_id: Annotated[str | None, ours("As prompt_cache_key, if that is not given.", "none")] = None
    chat_template_kwargs: Annotated[
        JsonObject | None,
        ours("Variables for the chat template, such as enable_thinking false.", "those of the operator"),
    ] = None
    include_reasoning: Annotated[bool | None, ours("Return the model's reasoning apart from the answer.", True)] = None


class AnyChat(Conversation, frozen=True, kw_only=True):
    """Fields of single and batched chats."""

    NOT_SERVED = Generation.NOT_SERVED | {
        "modalities": ([], ["text"]),
        "audio": (),
    }

    max_tokens: Annotated[
        Length | None, means("The longest answer, in tokens; the older name of max_completion_tokens.", ROOM)
    ] = None
    max_completion_tokens: Annotated[Length | None, means("The longest answer and reasoning, in tokens.", ROOM)] = None
    logprobs: Annotated[bool | None, means("Return the logprobs of the answer's tokens.", False)] = None
    tools: Annotated[list[Tool] | None, means("Functions and custom tools that the model may call.", "none")] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required", "any"] | NamedTool | None,
        means("Whether tools may, must or must not be called, or the one that must be; any is required.", "auto"),
    ] = None
    reasoning_effort: Annotated[
        str | None, means("How long the model is to think, for chat templates that read it.", "the template's")
    ] = None
    modalities: Annotated[list[str] | None, means("Kinds of answers; only text is served.", "text")] = None
    verbosity: Annotated[str | None, unused("How long answers are to be, for OpenAI's models.")] = None
    prediction: Annotated[JsonObject | None, unused("Text that the answer is expected to repeat.")] = None
    audio: Annotated[JsonObject | None, means("The voice of a spoken answer. Answers here are text.")] = None
    functions: Annotated[list[Function] | None, means("The older form of tools.", "none")] = None
    function_call: Annotated[
        Literal["none", "auto"] | NamedFunction | None, means("The older form of tool_choice.", "auto")
    ] = None
    # beyond OpenAI
    add_generation_prompt: Annotated[
        bool | None, ours("End the prompt where an answer begins.", "true, unless continue_final_message is")
    ] = None
    continue_final_message: Annotated[bool | None, ours("Continue the last message.", False)] = None
    echo: Annotated[bool | None, ours("Begin answers with the last message, if the assistant's.", False)] = None
    add_special_tokens: Annotated[
        bool | None, ours("Add the tokenizer's special tokens, which most templates write themselves.", False)
    ] = None
    chat_template: Annotated[
        str | None, ours("A Jinja template for this chat, if --trust-request-chat-template is on.", "the model's")
    ] = None
    documents: Annotated[list[JsonObject] | None, ours("Documents for chat templates that show them.", "none")] = None


class ChatRequest(AnyChat, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    EXAMPLE: ClassVar = {"messages": [QUESTION], "max_tokens": 50, "temperature": 0}

    messages: Annotated[list[Message], items(1), means("The conversation so far; the answer is its next turn.")]


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

    EXAMPLE: ClassVar = {"messages": [[QUESTION], [{"role": "user", "content": "And of Norway?"}]], "max_tokens": 50}

    messages: Annotated[
        list[Annotated[list[Message], items(1)]],
        items(1, MAX_PROMPTS),
        means("Several conversations; answer i is the next turn of the i-th."),
    ]

    @property
    def chats(self) -> list[ChatRequest]:
        shared = {name: getattr(self, name) for name in AnyChat.__struct_fields__}
        return [ChatRequest(messages=each, **shared) for each in self.messages]


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /tokenize: a text or a chat."""

    EXAMPLE: ClassVar = {"prompt": "The capital of France", "return_token_strs": True}

    model: Annotated[str | None, means("A served name.", "the served model")] = None
    prompt: Annotated[str | None, means("The text; give it or messages.")] = None
    messages: Annotated[Annotated[list[Message], items(1)] | None, means("The conversation; give it or prompt.")] = None
    tools: Annotated[list[Tool] | None, means("Tools that the conversation's prompt shows.", "none")] = None
    add_special_tokens: Annotated[
        bool | None, means("Add the tokenizer's special tokens.", "true for a text, false for a conversation")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, means("End where an answer begins.", "true, unless continue_final_message is")
    ] = None
    continue_final_message: Annotated[bool | None, means("End inside the last message.", False)] = None
    return_token_strs: Annotated[bool | None, means("Return the text of each token, too.", False)] = None
    chat_template: Annotated[
        str | None, means("A Jinja template, if --trust-request-chat-template is on.", "the model's")
    ] = None
    chat_template_kwargs: Annotated[
        JsonObject | None, means("Variables for the chat template.", "those of the operator")
    ] = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /detokenize: token ids to text."""

    EXAMPLE: ClassVar = {"tokens": [1, 2, 3]}

    model: Annotated[str | None, means("A served name.", "the served model")] = None
    tokens: Annotated[list[Natural], means("The token ids.")]


class AbortRequest(Body, frozen=True, kw_only=True):
    """POST /abort with the id of an answer of any endpoint, such as cmpl-…, chatcmpl-…, resp_… or msg_…."""

    EXAMPLE: ClassVar = {"request_id": "chatcmpl-…"}

    request_id: Annotated[str, means("Id of the answer.")]
