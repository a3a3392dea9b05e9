"""Scores and Reranking: the responses of /score and /rerank, a number for each pair of texts.

A model with a head for pairs scores each pair in one request. Of a model that embeds, the score is the cosine of two
vectors: each distinct text is embedded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .....ipc.codec import JsonObject
from .....ipc.errors import RequestError
from .....ipc.messages.client import Submit
from .....ipc.params.pooling_params import PoolingParams, PoolingTask
from .....ipc.params.sampling_params import SamplingParams
from ....forms.openai.errors import encode_json
from ....forms.openai.generation import Scheduled
from ....forms.openai.params import given_params
from ....forms.pooling.pooling_body import ScoreRequest
from ....forms.pooling.rerank_body import RerankRequest
from ....forms.pooling.tei_body import side_of
from ....forms.prompts import check_text, distinct_texts
from ...bodies.body_parser import ParsedBody
from ..openai.local_engine import LocalEngine
from ..openai.run import Run
from ..openai.slices import in_slices
from .pooled_results import PooledResults, new_id


class PairScores(PooledResults):
    """Base of the responses with a score for each pair of texts."""

    def __init__(
        self,
        engine: LocalEngine,
        model: str,
        request_id: str,
        pairs: Sequence[tuple[str, str]],
        params: SamplingParams,
        use_activation: bool | None,
        tasks: Sequence[PoolingTask],
    ) -> None:
        """`tasks`: those that the model serves. RequestError if it scores no pairs."""
        self._pairs, self._place_by_text = pairs, dict[str, int]()
        if "score" in tasks:
            pooling = PoolingParams(task="score", use_activation=use_activation)
            texts = [first for first, _ in pairs]
            submits = _submits(request_id, texts, params, pooling)
            submits = [
                msgspec.structs.replace(submit, text_pair=check_text(second))
                for submit, (_, second) in zip(submits, pairs, strict=True)
            ]
        elif "embed" in tasks:
            texts = distinct_texts(pairs)
            self._place_by_text = {text: place for place, text in enumerate(texts)}
            pooling = PoolingParams(task="embed", use_activation=True)
            submits = _submits(request_id, texts, params, pooling)
        else:
            served = ", ".join(tasks)
            raise RequestError(f"this model scores no pairs, since its head has several classes: it serves {served}")
        super().__init__(engine, model, request_id, submits)

    async def scores(self, run: Run) -> list[float]:
        """Return the score of each pair."""
        found = [each.floats() for each in await self.results(run)]
        places = self._place_by_text
        if not places:
            return [each[0] for each in found]
        return await in_slices(
            sum(a * b for a, b in zip(found[places[first]], found[places[second]], strict=True))
            for first, second in self._pairs
        )


class Scores(PairScores):
    """Response of /score."""

    def __init__(
        self, engine: LocalEngine, parsed: ParsedBody[ScoreRequest], model: str, tasks: Sequence[PoolingTask]
    ) -> None:
        body = parsed.body
        self.prompt_field = body.seconds_field
        firsts, seconds = body.firsts, [each.text or "" for each in parsed.inputs]
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            first, second = body.names
            raise RequestError(
                f"{first} has {len(firsts)} texts and {second} {len(seconds)}: give one first text, or equally many"
            )
        pairs = list(zip(firsts, seconds, strict=True))
        request_id = new_id("score", body.request_id)
        super().__init__(engine, model, request_id, pairs, _params(body), body.use_activation, tasks)

    async def whole(self) -> bytes:
        with self.run() as run:
            scores = await self.scores(run)
            data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
            return encode_json(self._head("list") | {"data": data, "usage": self.usage(run)})


class Reranking(PairScores):
    """Response of /rerank: the documents by falling relevance."""

    def __init__(
        self, engine: LocalEngine, parsed: ParsedBody[RerankRequest], model: str, tasks: Sequence[PoolingTask]
    ) -> None:
        body = self._body = parsed.body
        self.prompt_field = body.seconds_field
        if body.top_n is not None and body.top_n < 0:
            raise RequestError(f"top_n must be at least 0, got {body.top_n}")
        pairs = [(body.query, each.text or "") for each in parsed.inputs]
        params = _params(body)
        if body.truncate:
            params = params.replace(truncate_prompt_tokens=-1, truncation_side=side_of(body.truncation_direction))
        use_activation = False if body.raw_scores else body.use_activation
        super().__init__(engine, model, new_id("rerank", body.request_id), pairs, params, use_activation, tasks)

    async def whole(self) -> bytes:
        with self.run() as run:
            scores = await self.scores(run)
            order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._body.top_n or None]
            if self._body.texts is not None:
                return encode_json([self._text(index, scores[index]) for index in order])
            results = [self._document(index, scores[index]) for index in order]
            usage = self.usage(run)
            meta = {"billed_units": {"search_units": 1, "input_tokens": run.num_prompt_tokens}}
            return encode_json({"id": self.id, "model": self.model, "usage": usage, "results": results, "meta": meta})

    def _text(self, index: int, score: float) -> JsonObject:
        found: JsonObject = {"index": index, "score": score}
        return found | ({"text": self._pairs[index][1]} if self._body.return_text else {})

    def _document(self, index: int, score: float) -> JsonObject:
        found: JsonObject = {"index": index, "relevance_score": score}
        is_shown = self._body.return_documents is not False
        return found | ({"document": {"text": self._pairs[index][1]}} if is_shown else {})


def _params(body: Scheduled) -> SamplingParams:
    """Return the parameters of the requests. A pair is cut at its end, unless the body names the other side."""
    return given_params(body, max_tokens=1, truncation_side=body.truncation_side or "right")


def _submits(request_id: str, texts: Sequence[str], params: SamplingParams, pooling: PoolingParams) -> list[Submit]:
    return [
        Submit(
            request_id=request_id if len(texts) == 1 else f"{request_id}/{position}",
            params=params,
            prompt=check_text(text),
            pooling=pooling,
        )
        for position, text in enumerate(texts)
    ]
