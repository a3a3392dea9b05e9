"""/v1/embeddings: texts or token ids in, one vector for each out."""

from __future__ import annotations

import base64

from ...ipc.codec import JsonObject
from ...ipc.errors import RequestError
from ...ipc.messages.base import BulkArray
from ...ipc.pooling_params import PoolingParams
from ..client.outputs import floats
from ..intake.body_parser import ParsedBody
from .forms.errors import encode_json
from .forms.params import given_params
from .forms.prompts import answer_id, prompt_submits
from .forms.schema import EmbeddingRequest
from .local_engine import LocalEngine


class Embeddings:
    """One request to the endpoint. `whole` is used once."""

    def __init__(self, engine: LocalEngine, parsed: ParsedBody[EmbeddingRequest], model: str) -> None:
        body = parsed.body
        self._engine = engine
        self._body = body
        self._model = model
        self._id = answer_id("embd", body.request_id)
        params = given_params(body, max_tokens=1)
        pooling = PoolingParams(
            method=body.pooling or "last", normalize=body.normalize is not False, dimensions=body.dimensions
        )
        self._submits = prompt_submits(self._id, parsed.inputs, params, body.add_special_tokens, pooling)

    async def whole(self) -> bytes:
        with self._engine.run(self._submits) as run:
            vectors: list[BulkArray | None] = [None] * run.num_choices
            async for news in run.news():
                for index, delta in news:
                    vectors[index] = delta.embedding
                    if delta.finish_reason is not None and delta.embedding is None:
                        raise RequestError(
                            f"input[{index}] cannot be embedded: its request ended with {delta.finish_reason}"
                        )
            answer: JsonObject = {
                "id": self._id,
                "object": "list",
                "model": self._model,
                "data": [
                    {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
                    for index, vector in enumerate(vectors)
                    if vector is not None
                ],
                "usage": run.usage(),
            }
            return encode_json(answer)

    def _encoded(self, vector: BulkArray) -> str | list[float]:
        """base64: of the numbers as little-endian float32."""
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.data).decode()
        return floats(vector).tolist()
