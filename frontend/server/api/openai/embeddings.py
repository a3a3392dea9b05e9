"""Embeddings: the response of /v1/embeddings, one vector for each text, list of token ids, or chat."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable
from typing import TypeVar

from starlette.responses import Response

from .....ipc.errors import RequestError
from .....ipc.messages.client import Delta
from .....ipc.params.pooling_params import PoolingParams
from ....forms.openai.embedding_body import EmbeddingRequest, PooledInput
from ....forms.openai.errors import encode_json
from ....forms.openai.params import given_params, prompt_errors_about
from ....forms.openai.prompts import answer_id, prompt_submits
from ....forms.openai.vectors import packed
from ...bodies.body_parser import ParsedBody
from ..continuation import current
from .choices import EngineResponse
from .local_engine import LocalEngine
from .run import Run
from .slices import in_slices

T = TypeVar("T")
InputT = TypeVar("InputT", bound=PooledInput)
MAX_OPEN = 256  # prompts of one body that run at a time, so that a body of thousands does not hold up others
MAX_DESCRIBED = 512  # most vectors in a metadata header: clients accept lines of up to 64 KiB


class Embeddings(EngineResponse):
    """Response to one request for embeddings. Created by `start`."""

    max_open = MAX_OPEN

    def __init__(self, engine: LocalEngine, parsed: ParsedBody[EmbeddingRequest], model: str) -> None:
        body = parsed.body
        self._body = body
        self.prompt_field = "input" if body.messages is None else "messages"
        self._form = body.embed_dtype or "float32", body.endianness or "native"  # dtype and byte order if packed
        if body.encoding_format == "bytes" and len(parsed.inputs) > MAX_DESCRIBED:
            raise RequestError(
                f"encoding_format is bytes, whose header describes up to {MAX_DESCRIBED} vectors, and there are "
                f"{len(parsed.inputs)}: use bytes_only or send several requests"
            )
        pooling = self._pooling_params(body)
        params = given_params(body, max_tokens=1)
        request_id = answer_id("embd", body.request_id, current().digits("id"))
        submits = prompt_submits(request_id, parsed.inputs, params, body.add_special_tokens, pooling)
        super().__init__(engine, model, request_id, submits)

    def _pooling_params(self, body: EmbeddingRequest) -> PoolingParams:
        use_activation = body.normalize if body.use_activation is None else body.use_activation
        return PoolingParams(
            task="embed",
            method=body.pooling,
            use_activation=use_activation,
            dimensions=body.dimensions,
            prompt_name=body.prompt_name,
        )

    @classmethod
    async def start(cls, engine: LocalEngine, parsed: ParsedBody[EmbeddingRequest], model: str) -> Embeddings:
        """Check all fields and, for a chat, make the prompt; return the response. `whole` starts the embedding."""
        return cls(engine, await with_chat(engine, parsed), model)

    async def whole(self) -> bytes | Response:
        with self.run() as run:
            vectors = await self._vectors(run)
            if self._body.encoding_format in ("bytes", "bytes_only"):
                return await self._as_bytes(vectors, run)
            data = await in_slices(
                {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
                for index, vector in enumerate(vectors)
            )
            return encode_json(self._head("list") | {"data": data, "usage": run.usage()})

    async def vectors(self) -> tuple[list[list[float]], int]:
        """Return the vector of each prompt, and the number of tokens of all prompts."""
        with self.run() as run:
            found = await self._vectors(run)
            return [each.tolist() for each in found], run.num_prompt_tokens

    async def _vectors(self, run: Run) -> list[array[float]]:
        """Return the vector of each prompt."""
        found = await results_of(run, self.prompt_field, "embedded", lambda delta: delta.embedding)
        return [each.floats() for each in found]

    def _encoded(self, vector: array[float]) -> str | list[float]:
        is_text = self._body.encoding_format == "base64"
        return base64.b64encode(self._packed(vector)).decode() if is_text else vector.tolist()

    def _packed(self, vector: array[float]) -> bytes:
        return packed(vector, *self._form)

    async def _as_bytes(self, vectors: list[array[float]], run: Run) -> Response:
        """Return the concatenated vectors as a response. Unless encoding_format is bytes_only, a header describes each
        vector."""
        pieces = await in_slices(map(self._packed, vectors))
        answer = Response(b"".join(pieces), media_type="application/octet-stream")
        if self._body.encoding_format == "bytes":
            embed_dtype, endianness = self._form
            form = {"embed_dtype": embed_dtype, "endianness": endianness, "shape": [len(vectors[0])]}
            size = len(pieces[0])
            data = [{"index": i, "start": i * size, "end": (i + 1) * size, **form} for i in range(len(pieces))]
            usage = dict.fromkeys(("prompt_tokens", "total_tokens"), run.num_prompt_tokens)
            head = {"id": self.id, "created": self._created, "model": self.model}
            answer.headers["metadata"] = json.dumps(head | {"data": data, "usage": usage})
        return answer


async def with_chat(engine: LocalEngine, parsed: ParsedBody[InputT]) -> ParsedBody[InputT]:
    """Return the body with the prompt of its chat, if it has one, as its only input."""
    body = parsed.body
    if body.messages is None:
        return parsed
    cut_side = engine.inputs.limits.cut_side(body.truncate_prompt_tokens, body.truncation_side)
    with prompt_errors_about("messages"):
        prompt = await engine.chat_prompt(ParsedBody(body.chat, parsed.inputs), cut_side)
    return parsed._replace(inputs=[prompt])


async def results_of(run: Run, field: str, verb: str, result: Callable[[Delta], T | None]) -> list[T]:
    """Return, for each prompt, the last value of `result` over its deltas that is not None.

    RequestError if a prompt ends without one: it says that an item of `field` cannot be `verb` (a participle)."""
    results: dict[int, T] = {}
    async for deltas in run.deltas():
        for index, delta in deltas:
            if (found := result(delta)) is not None:
                results[index] = found
            elif delta.finish_reason is not None and index not in results:
                raise RequestError(f"{field}[{index}] cannot be {verb}: its request ended with {delta.finish_reason}")
    return [results[index] for index in range(run.num_choices)]
