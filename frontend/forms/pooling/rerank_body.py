"""Body of /rerank and its versions, in the forms of vLLM, Cohere, Jina and Text Embeddings Inference."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ..field import means, ours
from ..openai.generation import MAX_PROMPTS, Scheduled, items


class RerankRequest(Scheduled, frozen=True, kw_only=True):
    """POST /rerank, /v1/rerank and /v2/rerank: a query and documents, which are returned by falling relevance. With
    `texts` in place of `documents` the answer has the form of Text Embeddings Inference."""

    EXAMPLE: ClassVar = {"query": "A capital?", "documents": ["Oslo", "Lego"]}

    query: Annotated[str, means("The text that the documents are compared with.")]
    documents: Annotated[
        Annotated[list[str | JsonObject], items(1, MAX_PROMPTS)] | None,
        means("The documents: texts, or objects with a text; or give texts."),
    ] = None
    texts: Annotated[
        Annotated[list[str], items(1, MAX_PROMPTS)] | None,
        means("The documents, for an answer in the form of Text Embeddings Inference."),
    ] = None
    top_n: Annotated[int | None, means("How many of the best documents are returned; 0: all.", "all")] = None
    return_documents: Annotated[bool | None, means("Return the texts of the documents, too.", True)] = None
    return_text: Annotated[bool | None, means("With texts: return the texts, too.", False)] = None
    raw_scores: Annotated[bool | None, means("Return logits instead of probabilities.", False)] = None
    truncate: Annotated[bool | None, means("With texts: cut what does not fit.", False)] = None
    truncation_direction: Annotated[
        Literal["Left", "Right", "left", "right"] | None, means("With texts: the end that is cut.", "Right")
    ] = None
    use_activation: Annotated[
        bool | None, ours("Make probabilities of a reranker's logits.", "as the checkpoint does")
    ] = None

    @property
    def seconds_field(self) -> str:
        """The field of the documents, for errors about them."""
        return "documents" if self.texts is None else "texts"

    @property
    def seconds(self) -> list[str]:
        """The texts of the documents. RequestError unless exactly one of the fields for them is given, or if a document
        has no text."""
        if (self.documents is None) == (self.texts is None):
            raise RequestError("documents must be given, or texts in their place: give exactly one")
        if self.texts is not None:
            return self.texts
        return [_text_of(each, index) for index, each in enumerate(self.documents or ())]


def _text_of(document: str | JsonObject, index: int) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise RequestError(f"documents[{index}] has no text: give a text, or an object with one")
    return text
