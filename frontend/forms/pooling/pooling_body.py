"""Bodies of /pooling, /classify and /score, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from ....ipc.errors import RequestError
from ....ipc.params.pooling_params import MAX_RETURNED_IDS
from ..field import means, ours
from ..openai.embedding_body import EmbeddingRequest, PooledInput
from ..openai.generation import MAX_PROMPTS, Natural, Scheduled, items

Texts: TypeAlias = str | Annotated[list[str], items(1, MAX_PROMPTS)]
PAIRS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))


class PoolingRequest(EmbeddingRequest, frozen=True, kw_only=True):
    """POST /pooling: the result of any task that the model serves."""

    task: Annotated[
        Literal["embed", "classify", "score", "token_embed", "token_classify"] | None,
        ours("What is made of each prompt.", "the model's own task"),
    ] = None
    step_tag_id: Annotated[
        Natural | None, ours("With token_classify: return the rows of this token alone.", "all rows")
    ] = None
    returned_token_ids: Annotated[
        Annotated[list[Natural], items(1, MAX_RETURNED_IDS)] | None,
        ours("With token_classify: return these columns of the logits alone.", "all columns"),
    ] = None


class ClassificationRequest(PooledInput, frozen=True, kw_only=True):
    """POST /classify: the classes of texts, token ids or a chat."""

    EXAMPLE: ClassVar = {"input": ["I like it", "I do not"]}


class ScoreRequest(Scheduled, frozen=True, kw_only=True):
    """POST /score: pairs of texts, one text with each of many, or two lists item by item. The names of both sides are
    vLLM's; one pair of names is given."""

    EXAMPLE: ClassVar = {"text_1": "A capital?", "text_2": ["Oslo", "Lego"]}

    queries: Annotated[Texts | None, means("The first texts of the pairs.")] = None
    documents: Annotated[Texts | None, means("The second texts, with queries.")] = None
    items: Annotated[Texts | None, means("Another name of documents.")] = None
    text_1: Annotated[Texts | None, means("The first texts, under their older name.")] = None
    text_2: Annotated[Texts | None, means("The second texts, with text_1.")] = None
    data_1: Annotated[Texts | None, means("The first texts, under a further name.")] = None
    data_2: Annotated[Texts | None, means("The second texts, with data_1.")] = None
    use_activation: Annotated[
        bool | None, ours("Make probabilities of a reranker's logits.", "as the checkpoint does")
    ] = None

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two sides. RequestError unless exactly one pair of names is given."""
        given = {name for pair in PAIRS for name in pair if getattr(self, name) is not None}
        found = [pair for pair in PAIRS if set(pair) == given]
        if len(found) != 1:
            listed = ", ".join(f"{first} and {second}" for first, second in PAIRS)
            raise RequestError(f"the texts to score are given as {sorted(given)}: give one pair of {listed}")
        return found[0]

    @property
    def seconds_field(self) -> str:
        """The field of the second texts, for errors about them."""
        return self.names[1]

    @property
    def firsts(self) -> list[str]:
        """The first texts."""
        return _listed(getattr(self, self.names[0]))

    @property
    def seconds(self) -> list[str]:
        """The second texts."""
        return _listed(getattr(self, self.names[1]))


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
