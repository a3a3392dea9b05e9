"""Bodies of /embed, /similarity and /predict, in the form of Hugging Face's Text Embeddings Inference."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec

from ....ipc.errors import RequestError
from ..field import means, ours
from ..openai.embedding_body import EmbeddingRequest
from ..openai.generation import MAX_PROMPTS, Body, Prompts, RequestId, items

Direction: TypeAlias = Annotated[
    Literal["Left", "Right", "left", "right"] | None, means("The end that truncate cuts.", "Right")
]
Truncate: TypeAlias = Annotated[bool | None, means("Cut a text that does not fit, which is refused otherwise.", False)]
Sequences: TypeAlias = Annotated[list[str | Annotated[list[str], items(1, 2)]], items(1, MAX_PROMPTS)]


class TeiEmbedRequest(Body, frozen=True, kw_only=True):
    """POST /embed: texts, or one."""

    EXAMPLE: ClassVar = {"inputs": ["Paris", "Oslo"]}

    inputs: Annotated[Prompts, means("A text or token ids, or a list of several.")]
    normalize: Annotated[bool | None, means("Scale each vector to length 1.", True)] = None
    truncate: Truncate = None
    truncation_direction: Direction = None
    prompt_name: Annotated[
        str | None, means("The checkpoint's prompt to put before each text.", "the checkpoint's default")
    ] = None
    dimensions: Annotated[int | None, means("Keep the first numbers of each vector only.", "all")] = None
    request_id: Annotated[RequestId | None, ours("The caller's own id.", "a random one")] = None

    @property
    def embedding(self) -> EmbeddingRequest:
        """The options of the request, without its texts, as an EmbeddingRequest."""
        return EmbeddingRequest(
            use_activation=self.normalize is not False,
            dimensions=self.dimensions,
            prompt_name=self.prompt_name,
            truncate_prompt_tokens=-1 if self.truncate else None,
            truncation_side=side_of(self.truncation_direction),
            request_id=self.request_id,
        )


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A text, and those that it is compared with."""

    source_sentence: Annotated[str, means("The text that the others are compared with.")]
    sentences: Annotated[Annotated[list[str], items(1, MAX_PROMPTS)], means("The other texts.")]


class SimilarityParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How the texts of /similarity are embedded."""

    truncate: Truncate = None
    truncation_direction: Direction = None
    prompt_name: Annotated[
        str | None, means("The checkpoint's prompt to put before each text.", "the checkpoint's default")
    ] = None


class SimilarityRequest(Body, frozen=True, kw_only=True):
    """POST /similarity: the cosine of a text's vector and each of others'."""

    EXAMPLE: ClassVar = {"inputs": {"source_sentence": "Paris", "sentences": ["Oslo", "Lego"]}}

    inputs: Annotated[Compared, means("The texts.")]
    parameters: Annotated[SimilarityParameters | None, means("How they are embedded.")] = None
    request_id: Annotated[RequestId | None, ours("The caller's own id.", "a random one")] = None

    @property
    def texts(self) -> list[str]:
        """All texts, the compared one first. RequestError if there are no others, or too many."""
        count = len(self.inputs.sentences)
        if not 1 <= count <= MAX_PROMPTS:
            raise RequestError(f"inputs.sentences has {count} texts: give 1 to {MAX_PROMPTS}")
        return [self.inputs.source_sentence, *self.inputs.sentences]

    @property
    def embed_request(self) -> TeiEmbedRequest:
        """The request that embeds the texts."""
        given = self.parameters or SimilarityParameters()
        return TeiEmbedRequest(
            inputs=[*self.texts],
            truncate=given.truncate,
            truncation_direction=given.truncation_direction,
            prompt_name=given.prompt_name,
            request_id=self.request_id,
        )


class PredictRequest(Body, frozen=True, kw_only=True):
    """POST /predict: the classes of a text, of a pair of texts, or of a list of lists with one text or two."""

    EXAMPLE: ClassVar = {"inputs": [["I like it"], ["I do not"]]}

    inputs: Annotated[str | Sequences, means("A text, a list of two texts, or a list of lists of one or two texts.")]
    raw_scores: Annotated[bool | None, means("Return logits instead of probabilities.", False)] = None
    truncate: Truncate = None
    truncation_direction: Direction = None
    request_id: Annotated[RequestId | None, ours("The caller's own id.", "a random one")] = None

    @property
    def is_batch(self) -> bool:
        """Whether the inputs are a list of sequences, rather than one."""
        return not isinstance(self.inputs, str) and any(isinstance(each, list) for each in self.inputs)

    @property
    def sequences(self) -> list[list[str]]:
        """The sequences, each of one text or two. RequestError for other forms."""
        inputs = self.inputs
        if isinstance(inputs, str):
            return [[inputs]]
        found = [each for each in inputs if isinstance(each, list)]
        if not found:
            found = [[each for each in inputs if isinstance(each, str)]]
        elif len(found) < len(inputs):
            raise RequestError("inputs has texts beside lists of texts: give one kind")
        for index, each in enumerate(found):
            if not 1 <= len(each) <= 2:
                raise RequestError(f"inputs[{index}] has {len(each)} texts: a sequence has one or two")
        return found


def side_of(direction: str | None) -> Literal["left", "right"]:
    """Return the side of a truncation."""
    return "left" if direction in ("Left", "left") else "right"
