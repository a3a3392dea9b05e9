"""Define the bodies of Ollama's API and rewrite them as chats, completions and requests for embeddings.

If `stream` is left out the answer is streamed, unlike in OpenAI's API. Context length, threads and layers on a device
are set by the operator here: options that set them are accepted and have no effect.
"""

from __future__ import annotations

from typing import Any, Literal

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ..openai import schema as openai
from ..openai.embedding_body import EmbeddingRequest
from ..openai.parts import MessagePart, Sent
from ..openai.schema import Body, ChatRequest, CompletionRequest, Message, Tool

LATEST = ":latest"  # Ollama's clients add it to names without a tag
_SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")


class Options(Body, frozen=True, kw_only=True):
    """Sampling options of a request. The options after `stop` are accepted and have no effect."""

    num_predict: int | None = None  # the longest answer; below 1: as long as fits
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # without effect
    num_ctx: object = None
    num_keep: object = None
    num_batch: object = None
    num_gpu: object = None
    main_gpu: object = None
    num_thread: object = None
    numa: object = None
    use_mmap: object = None
    use_mlock: object = None
    low_vram: object = None
    f16_kv: object = None
    vocab_only: object = None
    repeat_last_n: object = None
    penalize_newline: object = None
    typical_p: object = None
    tfs_z: object = None
    mirostat: object = None
    mirostat_eta: object = None
    mirostat_tau: object = None

    def fields(self) -> dict[str, Any]:
        """Return the options as fields of a Generation."""
        found = {name: getattr(self, name) for name in _SAME}
        if self.num_predict is not None and self.num_predict > 0:
            found["max_tokens"] = self.num_predict
        return found | {"repetition_penalty": self.repeat_penalty}


class CalledFunction(Sent, frozen=True, kw_only=True):
    name: str
    arguments: JsonObject | None = None


class OllamaCall(Sent, frozen=True, kw_only=True):
    """Call in an earlier answer. Calls have no ids in Ollama's API: a result names its function."""

    id: str | None = None
    function: CalledFunction


class OllamaMessage(Sent, frozen=True, kw_only=True):
    role: str
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None  # base64
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None  # of a result
    tool_call_id: str | None = None


class Loaded(Body, frozen=True, kw_only=True):
    """Base of the bodies that name a model. `keep_alive` has no effect: the model stays loaded."""

    model: str | None = None
    name: str | None = None  # the older name of `model`
    keep_alive: object = None
    options: Options | None = None


class Answered(Loaded, frozen=True, kw_only=True):
    """Base of the bodies that ask for an answer."""

    stream: bool | None = None  # null: it is streamed
    format: Literal["", "json"] | JsonObject | None = None  # JSON, or the schema of the answer
    think: bool | Literal["low", "medium", "high"] | None = None
    # without effect: a prompt that does not fit is refused, and an answer ends at the context's end
    truncate: bool | None = None
    shift: bool | None = None

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

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None

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

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None

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

    input: str | list[str] = ""
    truncate: bool | None = None  # null: a longer text is cut
    dimensions: int | None = None

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

    prompt: str = ""

    @property
    def embedding(self) -> EmbeddingRequest:
        return EmbeddingRequest(input=[self.prompt], truncate_prompt_tokens=-1)


class NamedModel(Loaded, frozen=True, kw_only=True):
    """Body of the endpoints about one model. Endpoints that would change models do not read these fields."""

    verbose: bool | None = None
    stream: bool | None = None
    insecure: bool | None = None
    source: str | None = None
    destination: str | None = None


def message_of(turn: OllamaMessage) -> Message:
    """Return a message in Ollama's form as one in OpenAI's form."""
    content: str | list[MessagePart] = turn.content
    if turn.images:
        content = [MessagePart(type="image_url", image_url=_image_url(data)) for data in turn.images]
        if turn.content:
            content.append(MessagePart(type="text", text=turn.content))
    calls = [
        openai.ToolCall(
            id=each.id, function=openai.FunctionCall(name=each.function.name, arguments=each.function.arguments)
        )
        for each in turn.tool_calls or ()
    ]
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


def _response_format(given: str | JsonObject | None) -> openai.ResponseFormat | None:
    if not given:
        return None
    if isinstance(given, str):
        return openai.ResponseFormat(type="json_object")
    return openai.ResponseFormat(type="json_schema", json_schema={"schema": given})
