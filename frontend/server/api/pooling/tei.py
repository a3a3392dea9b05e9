"""The responses of /embed, /similarity and /predict, in the form of Text Embeddings Inference."""

from __future__ import annotations

from collections.abc import Sequence

from .....ipc.codec import JsonObject
from .....ipc.messages.base import BulkArray
from .....ipc.messages.client import Submit
from .....ipc.messages.intake import BodyInput
from .....ipc.params.pooling_params import PoolingParams
from .....ipc.params.sampling_params import SamplingParams
from ....forms.openai.errors import encode_json
from ....forms.pooling.tei_body import PredictRequest, SimilarityRequest, TeiEmbedRequest, side_of
from ....forms.prompts import check_text
from ...bodies.body_parser import ParsedBody
from ..openai.embeddings import Embeddings
from ..openai.local_engine import LocalEngine
from ..openai.slices import in_slices
from .pooled_results import PooledResults, new_id


class TeiEmbeddings(Embeddings):
    """Response with the vectors alone."""

    def __init__(self, engine: LocalEngine, parsed: ParsedBody[TeiEmbedRequest], model: str) -> None:
        super().__init__(engine, ParsedBody(parsed.body.embedding, parsed.inputs), model)
        self.prompt_field = "inputs"

    async def whole(self) -> bytes:
        with self.run() as run:
            found = await self._vectors(run)
            return encode_json(await in_slices(each.tolist() for each in found))


class Similarities(TeiEmbeddings):
    """Response with the cosine of the first text's vector and each other's."""

    def __init__(self, engine: LocalEngine, parsed: ParsedBody[SimilarityRequest], model: str) -> None:
        body = parsed.body
        inputs = [BodyInput(text=check_text(text)) for text in body.texts]
        super().__init__(engine, ParsedBody(body.embed_request, inputs), model)

    async def whole(self) -> bytes:
        with self.run() as run:
            source, *others = await self._vectors(run)
            cosines = (sum(a * b for a, b in zip(source, each, strict=True)) for each in others)
            return encode_json(await in_slices(cosines))


class Prediction(PooledResults):
    """Response with the classes of each sequence, the likeliest first."""

    prompt_field = "inputs"

    def __init__(
        self, engine: LocalEngine, parsed: ParsedBody[PredictRequest], model: str, labels: Sequence[str]
    ) -> None:
        """`labels`: the names of the classes."""
        body = self._body = parsed.body
        self._labels = labels
        request_id = new_id("predict", body.request_id)
        sequences = body.sequences
        params = SamplingParams(max_tokens=1)
        if body.truncate:
            params = params.replace(truncate_prompt_tokens=-1, truncation_side=side_of(body.truncation_direction))
        pooling = PoolingParams(task="classify", use_activation=False if body.raw_scores else None)
        submits = [
            Submit(
                request_id=request_id if len(sequences) == 1 else f"{request_id}/{position}",
                params=params,
                prompt=check_text(each[0]),
                text_pair=check_text(each[1]) if len(each) == 2 else None,
                pooling=pooling,
            )
            for position, each in enumerate(sequences)
        ]
        super().__init__(engine, model, request_id, submits)

    async def whole(self) -> bytes:
        with self.run() as run:
            found = await self.results(run)
            classes = await in_slices(map(self._classes, found))
            return encode_json(classes if self._body.is_batch else classes[0])

    def _classes(self, result: BulkArray) -> list[JsonObject]:
        likeliest = sorted(zip(result.floats(), self._labels, strict=True), key=lambda each: -each[0])
        return [{"label": label, "score": score} for score, label in likeliest]
