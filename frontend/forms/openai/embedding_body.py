"""Bodies of embeddings, in OpenAI's form and in Cohere's, and of vLLM's generative scoring."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.params.pooling_params import PoolingMethod
from ....ipc.params.sampling_params import MAX_LOGPROB_TOKEN_IDS
from ..field import means, ours
from .generation import MAX_PROMPTS, Body, Prompts, RequestId, Scheduled, TokenId, items
from .schema import Message, TokenizeRequest

_Part: TypeAlias = str | Annotated[list[TokenId], items(1)]
_Parts: TypeAlias = Annotated[list[_Part], items(1, MAX_PROMPTS)]
_Labels: TypeAlias = Annotated[list[TokenId], items(1, MAX_LOGPROB_TOKEN_IDS)]
INPUT_TYPES = ("search_document", "search_query", "classification", "clustering")  # Cohere's


class PooledInput(Scheduled, frozen=True, kw_only=True):
    """Fields of the bodies whose prompts are texts or token ids, or a chat."""

    input: Annotated[Prompts | None, means("A text or token ids, or a list of several; or give messages.")] = None
    # beyond OpenAI
    messages: Annotated[Annotated[list[Message], items(1)] | None, ours("A conversation; give it or input.")] = None
    use_activation: Annotated[
        bool | None,
        ours("Scale each vector to length 1; make probabilities of logits.", "as the checkpoint does"),
    ] = None
    add_special_tokens: Annotated[
        bool | None, ours("Add the tokenizer's special tokens.", "true for texts, false for a conversation")
    ] = None
    add_generation_prompt: Annotated[bool | None, ours("End a conversation where an answer begins.", False)] = None
    continue_final_message: Annotated[bool | None, ours("End a conversation inside its last message.", False)] = None
    chat_template: Annotated[
        str | None, ours("A Jinja template, if --trust-request-chat-template is on.", "the model's")
    ] = None
    chat_template_kwargs: Annotated[
        JsonObject | None, ours("Variables for the chat template.", "those of the operator")
    ] = None

    @property
    def chat(self) -> TokenizeRequest:
        """The chat as a TokenizeRequest; by default without a generation prompt."""
        names = ("messages", "continue_final_message", "chat_template", "chat_template_kwargs", "add_special_tokens")
        given = {name: getattr(self, name) for name in names}
        return TokenizeRequest(**given, add_generation_prompt=bool(self.add_generation_prompt))


class EmbeddingRequest(PooledInput, frozen=True, kw_only=True):
    """POST /v1/embeddings: texts or token ids, or a chat."""

    EXAMPLE: ClassVar = {"input": ["Paris", "Oslo"]}

    encoding_format: Annotated[
        Literal["float", "base64", "bytes", "bytes_only"] | None,
        means("Numbers as JSON or as base64; bytes and bytes_only send them packed.", "float"),
    ] = None
    dimensions: Annotated[
        int | None, means("Keep the first numbers of each vector only, if the model allows it.", "all")
    ] = None
    # beyond OpenAI
    embed_dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None,
        ours("Format of packed numbers.", "float32"),
    ] = None
    endianness: Annotated[
        Literal["native", "big", "little"] | None, ours("Byte order of packed numbers.", "native")
    ] = None
    pooling: Annotated[
        PoolingMethod | None,
        ours("How one vector is made of those of the tokens, such as last or mean.", "the checkpoint's, or last"),
    ] = None
    normalize: Annotated[bool | None, ours("The older name of use_activation.", "as the checkpoint does")] = None
    prompt_name: Annotated[
        str | None, ours("The checkpoint's prompt to put before each text.", "the checkpoint's default")
    ] = None


class CohereEmbedRequest(Body, frozen=True, kw_only=True):
    """POST /v1/embed and /v2/embed."""

    NOT_SERVED: ClassVar[dict[str, tuple[object, ...]]] = {"images": ([],), "inputs": ([],)}

    EXAMPLE: ClassVar = {"texts": ["Paris", "Oslo"], "embedding_types": ["float"]}

    model: Annotated[
        str | None, means("A served name or a loaded LoRA adapter, as /v1/models lists them.", "the served model")
    ] = None
    texts: Annotated[list[str], items(1, MAX_PROMPTS), means("The texts to embed.")]
    input_type: Annotated[
        str | None,
        means("What the texts are for, such as search_query: the model may put a prefix before them.", "none"),
    ] = None
    embedding_types: Annotated[
        list[Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]] | None,
        means("The forms in which each vector is returned.", "float"),
    ] = None
    output_dimension: Annotated[
        int | None, means("Keep the first numbers of each vector only, if the model allows it.", "all")
    ] = None
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        means("The end at which longer texts are cut; NONE refuses them.", "END"),
    ] = None
    max_tokens: Annotated[int | None, means("Tokens from which a text counts as longer.", "what fits")] = None
    images: Annotated[list[str] | None, means("Images to embed, which no model here does.", "none")] = None
    inputs: Annotated[list[JsonObject] | None, means("Texts mixed with images; give texts.", "none")] = None
    priority: Annotated[
        int | None, ours("Lower values run first, if the engine has --scheduling-policy priority.", 0)
    ] = None
    # beyond Cohere and vLLM
    timeout_s: Annotated[float | None, ours("Seconds after which the request ends.", "no limit")] = None
    request_id: Annotated[RequestId | None, ours("The caller's own id.", "a random one")] = None

    @property
    def embedding(self) -> EmbeddingRequest:
        """The options of the request, without its texts, as an EmbeddingRequest."""
        return EmbeddingRequest(
            dimensions=self.output_dimension,
            prompt_name="",  # `prefix` is a part of each text
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

    EXAMPLE: ClassVar = {"query": "A capital? ", "items": ["Oslo", "Lego"], "label_token_ids": [1, 2]}

    query: Annotated[_Part, means("The text, or token ids, that all prompts share.")]
    items: Annotated[_Parts, means("What comes behind the query, one for each prompt.")]
    label_token_ids: Annotated[_Labels, means("Tokens that may come next; the score is the probability of the first.")]
    apply_softmax: Annotated[bool | None, means("Let the probabilities of the labels sum up to 1.", True)] = None
    item_first: Annotated[bool | None, means("Put the item before the query.", False)] = None
    add_special_tokens: Annotated[bool | None, means("Add the tokenizer's special tokens to the query.", True)] = None
