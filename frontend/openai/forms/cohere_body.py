"""Define the body of Cohere's embedding requests and rewrite it as an EmbeddingRequest."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from .schema import MAX_PROMPTS, Body, EmbeddingRequest, RequestId, Text, items

INPUT_TYPES = ("search_document", "search_query", "classification", "clustering")  # Cohere's


class CohereEmbedRequest(Body, frozen=True, kw_only=True):
    """POST /v1/embed and /v2/embed."""

    NOT_SERVED: ClassVar[dict[str, tuple[object, ...]]] = {"images": ([],), "inputs": ([],)}

    model: str | None = None
    texts: Annotated[list[Text], items(1, MAX_PROMPTS)]
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
        """Return the request without its texts."""
        return EmbeddingRequest(
            dimensions=self.output_dimension,
            truncate_prompt_tokens=None if self.truncate == "NONE" else self.max_tokens or -1,
            truncation_side="left" if self.truncate == "START" else "right",
            priority=self.priority,
            timeout_s=self.timeout_s,
            request_id=self.request_id,
        )

    def prefix(self, prefixes: dict[str, str]) -> str:
        """Return the text that goes before each text for this input_type; RequestError if the checkpoint lacks it.

        `prefixes`: the checkpoint's own, by input_type. Cohere's clients always send an input_type: if the checkpoint
        has none, Cohere's input types are accepted and add nothing."""
        known = {"": "", **(prefixes or dict.fromkeys(INPUT_TYPES, ""))}
        if (asked := self.input_type or "") not in known:
            named = ", ".join(filter(None, known))
            raise RequestError(f"input_type: Unsupported input_type {asked!r:.80}, this model has {named}")
        return known[asked]
