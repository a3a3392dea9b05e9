"""Bodies of embeddings, in OpenAI's form and in Cohere's, and of vLLM's generative scoring."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.params.sampling_params import MAX_LOGPROB_TOKEN_IDS
from .schema import MAX_PROMPTS, Body, Message, Prompts, RequestId, Scheduled, TokenId, TokenizeRequest, items

_Part: TypeAlias = str | Annotated[list[TokenId], items(1)]
_Parts: TypeAlias = Annotated[list[_Part], items(1, MAX_PROMPTS)]
_Labels: TypeAlias = Annotated[list[TokenId], items(1, MAX_LOGPROB_TOKEN_IDS)]
INPUT_TYPES = ("search_document", "search_query", "classification", "clustering")  # Cohere's


class EmbeddingRequest(Scheduled, frozen=True, kw_only=True):
    """POST /v1/embeddings: texts or token ids, or a chat."""

    input: Prompts | None = None  # in the forms of a completion's prompt
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    dimensions: int | None = None
    # beyond OpenAI
    messages: Annotated[list[Message], items(1)] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None  # if packed
    endianness: Literal["native", "big", "little"] | None = None  # byte order, if packed
    pooling: Literal["last", "mean"] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None  # the older name of use_activation
    add_special_tokens: bool | None = None  # null: with texts, but not with a chat
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None

    @property
    def chat(self) -> TokenizeRequest:
        """The chat to embed, as a TokenizeRequest; by default without a generation prompt."""
        names = ("messages", "continue_final_message", "chat_template", "chat_template_kwargs", "add_special_tokens")
        given = {name: getattr(self, name) for name in names}
        return TokenizeRequest(**given, add_generation_prompt=bool(self.add_generation_prompt))


class CohereEmbedRequest(Body, frozen=True, kw_only=True):
    """POST /v1/embed and /v2/embed."""

    NOT_SERVED: ClassVar[dict[str, tuple[object, ...]]] = {"images": ([],), "inputs": ([],)}

    model: str | None = None
    texts: Annotated[list[str], items(1, MAX_PROMPTS)]
    input_type: str | None = None
    embedding_types: list[Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = None  # per text; a longer text is truncated, or refused if truncate is NONE
    images: list[str] | None = None
    inputs: list[JsonObject] | None = None
    priority: int | None = None
    # beyond Cohere and vLLM
    timeout_s: float | None = None
    request_id: RequestId | None = None

    @property
    def embedding(self) -> EmbeddingRequest:
        """The options of the request, without its texts, as an EmbeddingRequest."""
        return EmbeddingRequest(
            dimensions=self.output_dimension,
            truncate_prompt_tokens=None if self.truncate == "NONE" else self.max_tokens or -1,
            truncation_side="left" if self.truncate == "START" else "right",
            priority=self.priority,
            timeout_s=self.timeout_s,
            request_id=self.request_id,
        )

    def prefix(self, prefixes: dict[str, str]) -> str:
        """Return the prefix of all texts for this input_type; RequestError if the model has no such type.

        `prefixes`: the checkpoint's own, by input_type. Cohere's clients always send an input_type: if the checkpoint
        has none, Cohere's input types are accepted and add nothing."""
        known = {"": "", **(prefixes or dict.fromkeys(INPUT_TYPES, ""))}
        if (asked := self.input_type or "") not in known:
            named = ", ".join(filter(None, known))
            raise RequestError(f"input_type: Unsupported input_type {asked!r:.80}, this model has {named}")
        return known[asked]


class GenerativeScoringRequest(Scheduled, frozen=True, kw_only=True):
    """POST /generative_scoring: each prompt consists of the query and one of the items."""

    query: _Part
    items: _Parts
    label_token_ids: _Labels  # the score is the probability of the first label
    apply_softmax: bool | None = None  # normalize over the labels; null: true
    item_first: bool | None = None
    add_special_tokens: bool | None = None  # add them to the query; null: true
