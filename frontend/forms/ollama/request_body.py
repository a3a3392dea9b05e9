"""Define the bodies of Ollama's API and rewrite them as chats, completions and requests for embeddings.

If `stream` is left out the answer is streamed, unlike in OpenAI's API. Context length, threads and layers on a device
are set by the operator here: options that set them are accepted and have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ..field import means, unused
from ..openai.embedding_body import EmbeddingRequest
from ..openai.generation import Body, ResponseFormat
from ..openai.parts import MessagePart, Sent
from ..openai.schema import QUESTION, ChatRequest, CompletionRequest, Message
from ..openai.tools import FunctionCall, Tool, ToolCall

LATEST = ":latest"  # Ollama's clients add it to names without a tag
_SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")


class Options(Body, frozen=True, kw_only=True):
    """Sampling options of a request. The options after `stop` are accepted and have no effect."""

    num_predict: Annotated[
        int | None, means("The longest answer, in tokens; below 1: as long as fits.", "the model's, or as long as fits")
    ] = None
    temperature: Annotated[float | None, means("How freely tokens are drawn; 0 always takes the likeliest.")] = None
    top_k: Annotated[int | None, means("Draw only from this many of the likeliest tokens; 0: from all.")] = None
    top_p: Annotated[
        float | None, means("Draw only from the likeliest tokens whose probabilities first reach this sum.")
    ] = None
    min_p: Annotated[float | None, means("Draw only tokens at least this likely, relative to the likeliest.")] = None
    repeat_penalty: Annotated[
        float | None, means("Above 1, tokens that prompt or answer already have become less likely; 1: off.")
    ] = None
    presence_penalty: Annotated[
        float | None, means("Subtracted from the logit of each token that the answer already has.")
    ] = None
    frequency_penalty: Annotated[
        float | None, means("The same, times the number of times that the answer has the token.")
    ] = None
    seed: Annotated[
        int | None, means("Equal seeds draw equal tokens from equal prompts.", "a new one for each request")
    ] = None
    stop: Annotated[
        str | list[str] | None, means("A text, or several, at which the answer ends; the text is left out.", "none")
    ] = None
    # without effect
    num_ctx: Annotated[object, unused("Length of the context: see --max-model-len.")] = None
    num_keep: Annotated[object, unused("Tokens that stay if the context is shifted.")] = None
    num_batch: Annotated[object, unused("Tokens of a step: see --max-num-batched-tokens.")] = None
    num_gpu: Annotated[object, unused("Layers on a GPU.")] = None
    main_gpu: Annotated[object, unused("The GPU for small tensors.")] = None
    num_thread: Annotated[object, unused("Threads: see --num-threads.")] = None
    numa: Annotated[object, unused("Placement of memory.")] = None
    use_mmap: Annotated[object, unused("Weights are always mapped.")] = None
    use_mlock: Annotated[object, unused("Whether weights stay in memory.")] = None
    low_vram: Annotated[object, unused("Use less memory of a GPU.")] = None
    f16_kv: Annotated[object, unused("Numbers of the KV cache: see --kv-cache-dtype.")] = None
    vocab_only: Annotated[object, unused("Load the vocabulary only.")] = None
    repeat_last_n: Annotated[object, unused("Tokens that repeat_penalty looks at; it looks at all.")] = None
    penalize_newline: Annotated[object, unused("Whether repeat_penalty counts line breaks.")] = None
    typical_p: Annotated[object, unused("Typical sampling.")] = None
    tfs_z: Annotated[object, unused("Tail free sampling.")] = None
    mirostat: Annotated[object, unused("Mirostat sampling.")] = None
    mirostat_eta: Annotated[object, unused("Of Mirostat sampling.")] = None
    mirostat_tau: Annotated[object, unused("Of Mirostat sampling.")] = None

    def fields(self) -> dict[str, Any]:
        """Return the options as fields of a Generation."""
        found = {name: getattr(self, name) for name in _SAME}
        if self.num_predict is not None and self.num_predict > 0:
            found["max_tokens"] = self.num_predict
        return found | {"repetition_penalty": self.repeat_penalty}


class CalledFunction(Sent, frozen=True, kw_only=True):
    """Function that an earlier answer called."""

    name: Annotated[str, means("Name of the function.")]
    arguments: Annotated[JsonObject | None, means("Its arguments.", "none")] = None


class OllamaCall(Sent, frozen=True, kw_only=True):
    """Call in an earlier answer. A result names the call's id (tool_call_id), its function (tool_name), or both."""

    id: Annotated[str | None, means("Id of the call, if it has one.", "none")] = None
    function: Annotated[CalledFunction, means("What was called.")]


class OllamaMessage(Sent, frozen=True, kw_only=True):
    """Message of a chat."""

    role: Annotated[str, means("Who says it: system, user, assistant, or tool for a tool's result.")]
    content: Annotated[str, means("The text.")] = ""
    thinking: Annotated[str | None, means("The thoughts of an earlier answer.", "none")] = None
    images: Annotated[list[str] | None, means("Images in base64.", "none")] = None
    tool_calls: Annotated[list[OllamaCall] | None, means("Calls that an answer made.", "none")] = None
    tool_name: Annotated[str | None, means("Name of the tool whose result this is.")] = None
    tool_call_id: Annotated[str | None, means("Id of the call whose result this is.")] = None


class Loaded(Body, frozen=True, kw_only=True):
    """Base of the bodies that name a model. `keep_alive` has no effect: the model stays loaded."""

    model: Annotated[
        str | None, means("A served name or a LoRA adapter, with or without :latest.", "the served model")
    ] = None
    name: Annotated[str | None, means("The older name of model.")] = None
    keep_alive: Annotated[object, unused("How long the model stays in memory; it always does.")] = None
    options: Annotated[Options | None, means("Sampling, and the longest answer.", "the model's")] = None


class Answered(Loaded, frozen=True, kw_only=True):
    """Base of the bodies that ask for an answer."""

    stream: Annotated[bool | None, means("Send the answer piece by piece, as lines of JSON.", True)] = None
    format: Annotated[
        Literal["", "json"] | JsonObject | None, means("json, or the JSON schema of the answer.", "free text")
    ] = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None,
        means("Whether, or how long, the model thinks first.", "as the chat template does"),
    ] = None
    # without effect: a prompt that does not fit is refused, and an answer ends at the context's end
    truncate: Annotated[bool | None, unused("A prompt that is too long is refused.")] = None
    shift: Annotated[bool | None, unused("An answer ends where the context does.")] = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    def fields(self) -> dict[str, Any]:
        """Return the fields that a chat and a completion share."""
        return (self.options or Options()).fields() | {"response_format": _response_format(self.format)}

    def template_variables(self) -> JsonObject:
        """Return the switches for reasoning as variables of a chat template."""
        if self.think is None:
            return {}
        variables: JsonObject = dict.fromkeys(("enable_thinking", "thinking"), self.think is not False)
        if isinstance(self.think, str):
            variables["reasoning_effort"] = self.think
        return variables


class OllamaChatRequest(Answered, frozen=True, kw_only=True):
    """POST /api/chat. Without messages it asks only whether the model is there."""

    EXAMPLE: ClassVar = {"messages": [QUESTION], "options": {"num_predict": 50, "temperature": 0}}

    messages: Annotated[
        list[OllamaMessage] | None, means("The conversation so far.", "only report that the model is there")
    ] = None
    tools: Annotated[list[Tool] | None, means("Functions that the model may call.", "none")] = None

    @property
    def chat(self) -> ChatRequest:
        """The ChatRequest with the same meaning; RequestError for an invalid field."""
        return ChatRequest(
            messages=[message_of(each) for each in self.messages or ()],
            tools=self.tools or None,
            chat_template_kwargs=self.template_variables(),
            **self.fields(),
        )


class OllamaGenerateRequest(Answered, frozen=True, kw_only=True):
    """POST /api/generate: a turn of a chat; with `raw` a text to continue. With neither prompt nor images it asks only
    whether the model is there."""

    EXAMPLE: ClassVar = {"prompt": QUESTION["content"], "options": {"num_predict": 50, "temperature": 0}}

    prompt: Annotated[str, means("The user's text; empty: only report that the model is there.")] = ""
    system: Annotated[str | None, means("The system message.", "none")] = None
    images: Annotated[list[str] | None, means("Images in base64.", "none")] = None
    raw: Annotated[bool | None, means("Continue the prompt as it is, without the chat template.", False)] = None
    suffix: Annotated[str | None, means("Text behind a gap to fill. Refused: no model here fills it.")] = None
    template: Annotated[str | None, means("A template in Go's form. Refused: send raw with its text.")] = None
    context: Annotated[list[int] | None, means("Tokens of earlier turns. Refused: send them to /api/chat.")] = None

    @property
    def chat(self) -> ChatRequest:
        """The ChatRequest with the same meaning; RequestError for an invalid field, or one that is not served."""
        self._refuse_unserved()
        turns = [OllamaMessage(role="user", content=self.prompt, images=self.images)]
        if self.system:
            turns.insert(0, OllamaMessage(role="system", content=self.system))
        return ChatRequest(
            messages=[message_of(each) for each in turns],
            chat_template_kwargs=self.template_variables(),
            **self.fields(),
        )

    @property
    def completion(self) -> CompletionRequest:
        """The CompletionRequest for a raw prompt; RequestError if the body has images or a field that is not served."""
        self._refuse_unserved()
        if self.images:
            raise RequestError("images need the chat template: leave raw out")
        return CompletionRequest(prompt=self.prompt, **self.fields())

    def _refuse_unserved(self) -> None:
        if self.suffix:
            raise RequestError("suffix is not served: the model does not fill in the middle of a text")
        if self.template:
            raise RequestError("template is in Go's form, which is not served: send raw with the text that it makes")
        if self.context:
            raise RequestError("context is not served: send the earlier turns to /api/chat")


class OllamaEmbedRequest(Loaded, frozen=True, kw_only=True):
    """POST /api/embed."""

    EXAMPLE: ClassVar = {"input": ["Paris", "Oslo"]}

    input: Annotated[str | list[str], means("A text, or several.")] = ""
    truncate: Annotated[bool | None, means("Cut texts that are too long, or else refuse them.", True)] = None
    dimensions: Annotated[
        int | None, means("Keep the first numbers of each vector only, if the model allows it.", "all")
    ] = None

    @property
    def texts(self) -> list[str]:
        if isinstance(self.input, str):
            return list(filter(None, [self.input]))
        return self.input

    @property
    def embedding(self) -> EmbeddingRequest:
        longest = None if self.truncate is False else -1
        return EmbeddingRequest(input=list(self.texts), dimensions=self.dimensions, truncate_prompt_tokens=longest)


class OllamaEmbeddingsRequest(Loaded, frozen=True, kw_only=True):
    """POST /api/embeddings, the older form: one text."""

    EXAMPLE: ClassVar = {"prompt": "Paris"}

    prompt: Annotated[str, means("The text.")] = ""

    @property
    def embedding(self) -> EmbeddingRequest:
        return EmbeddingRequest(input=[self.prompt], truncate_prompt_tokens=-1)


class NamedModel(Loaded, frozen=True, kw_only=True):
    """Body of the endpoints about one model. Endpoints that would change models do not read these fields."""

    verbose: Annotated[bool | None, unused("Show the model's longer lists, too.")] = None
    stream: Annotated[bool | None, means("Answer a pull with lines of JSON.", True)] = None
    insecure: Annotated[bool | None, unused("Pull without TLS.")] = None
    source: Annotated[str | None, unused("The model to copy.")] = None
    destination: Annotated[str | None, unused("The copy's name.")] = None


def message_of(turn: OllamaMessage) -> Message:
    """Return a message in Ollama's form as one in OpenAI's form."""
    content: str | list[MessagePart] | None = turn.content
    if turn.images:
        content = [MessagePart(type="image_url", image_url=_image_url(data)) for data in turn.images]
        if turn.content:
            content.append(MessagePart(type="text", text=turn.content))
    calls = [
        ToolCall(id=each.id, function=FunctionCall(name=each.function.name, arguments=each.function.arguments))
        for each in turn.tool_calls or ()
    ]
    if calls and not content:  # the API has no null
        content = None
    return Message(
        role=turn.role,
        content=content,
        reasoning=turn.thinking,
        tool_calls=calls or None,
        name=turn.tool_name,
        tool_call_id=turn.tool_call_id,
    )


def _image_url(data: str) -> str:
    return data if data.startswith("data:") else f"data:image/*;base64,{data}"


def _response_format(given: str | JsonObject | None) -> ResponseFormat | None:
    if not given:
        return None
    if isinstance(given, str):
        return ResponseFormat(type="json_object")
    return ResponseFormat(type="json_schema", json_schema={"schema": given})
