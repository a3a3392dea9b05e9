"""Outputs of requests to pool, with vLLM's names and fields: embeddings, probabilities of classes, scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypedDict

import msgspec

from ....ipc.errors import RequestError
from ....ipc.messages.base import BulkArray
from ...forms.prompts import distinct_texts
from ..outputs import RequestOutput

Rows: TypeAlias = list[list[float]]


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """The vector of one prompt."""

    embedding: list[float]

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={len(self.embedding)})"


class ClassificationOutput(msgspec.Struct, kw_only=True):
    """The probabilities of the classes of one prompt; its logits, without an activation."""

    probs: list[float]

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={len(self.probs)})"


class ScoringOutput(msgspec.Struct, kw_only=True):
    """The score of a pair of texts."""

    score: float


class PoolingOutput(msgspec.Struct, kw_only=True):
    """The result of any task: numbers of the prompt, or a row of numbers for each of its tokens."""

    data: list[float] | Rows

    def __repr__(self) -> str:
        return f"PoolingOutput(num_numbers={len(self.data)})"


class _PromptFields(TypedDict):
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int


class _PooledPrompt(msgspec.Struct, kw_only=True):
    """A prompt whose request to pool has ended."""

    request_id: str
    prompt: str | None  # None: the prompt was token ids
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(_PooledPrompt, kw_only=True):
    """A prompt and its vector."""

    outputs: EmbeddingOutput


class ClassificationRequestOutput(_PooledPrompt, kw_only=True):
    """A prompt and the probabilities of its classes."""

    outputs: ClassificationOutput


class ScoringRequestOutput(_PooledPrompt, kw_only=True):
    """A pair of texts and its score."""

    outputs: ScoringOutput


class PoolingRequestOutput(_PooledPrompt, kw_only=True):
    """A prompt and its result."""

    outputs: PoolingOutput


class RerankResult(msgspec.Struct, kw_only=True):
    """A document and its relevance for a query. `index`: its place in the list of documents."""

    index: int
    document: str
    relevance_score: float


def to_embedding(output: RequestOutput) -> EmbeddingRequestOutput:
    """Return the last output of a request with its vector. RequestError, here and below, if the request was aborted or
    timed out, so that it has no result."""
    vector = EmbeddingOutput(embedding=_result(output).floats().tolist())
    return EmbeddingRequestOutput(**_prompt(output), outputs=vector)


def to_classification(output: RequestOutput) -> ClassificationRequestOutput:
    """Return the last output of a request with the probabilities of its classes."""
    probs = ClassificationOutput(probs=_result(output).floats().tolist())
    return ClassificationRequestOutput(**_prompt(output), outputs=probs)


def to_pooling(output: RequestOutput) -> PoolingRequestOutput:
    """Return the last output of a request with the result of its task."""
    return PoolingRequestOutput(**_prompt(output), outputs=PoolingOutput(data=_result(output).numbers()))


def to_scores(
    outputs: Sequence[RequestOutput], pairs: Sequence[tuple[str, str]], *, has_pairs: bool
) -> list[ScoringRequestOutput]:
    """Return the scores of pairs. `has_pairs`: an output is that of a pair; otherwise it is the embedding of one of the
    distinct texts."""
    if has_pairs:
        return list(map(_to_score, outputs))
    by_text = dict(zip(distinct_texts(pairs), outputs, strict=True))
    return [_to_similarity(by_text[first], by_text[second]) for first, second in pairs]


def _to_score(output: RequestOutput) -> ScoringRequestOutput:
    """Return the last output of a request for the score of a pair."""
    return ScoringRequestOutput(**_prompt(output), outputs=ScoringOutput(score=_result(output).floats()[0]))


def _to_similarity(first: RequestOutput, second: RequestOutput) -> ScoringRequestOutput:
    """Return the last outputs of two requests to embed with the cosine of their vectors, which have length 1."""
    one = _result(first).floats()
    two = _result(second).floats()
    score = sum(a * b for a, b in zip(one, two, strict=True))
    return ScoringRequestOutput(
        request_id=second.request_id,
        prompt=None,
        prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        outputs=ScoringOutput(score=score),
    )


def ranked(documents: Sequence[str], scores: Sequence[ScoringRequestOutput], top_n: int | None) -> list[RerankResult]:
    """Return the documents with the highest scores, the best first; all of them without `top_n`."""
    results = [
        RerankResult(index=index, document=document, relevance_score=score.outputs.score)
        for index, (document, score) in enumerate(zip(documents, scores, strict=True))
    ]
    return sorted(results, key=lambda each: -each.relevance_score)[:top_n]


def _prompt(output: RequestOutput) -> _PromptFields:
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
    }


def _result(output: RequestOutput) -> BulkArray:
    if output.embedding is None:
        reason = output.outputs[0].finish_reason
        raise RequestError(f"request {output.request_id} ended with {reason} before its prompt was pooled")
    return output.embedding
