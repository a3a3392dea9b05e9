"""Pooling and Classification: the responses of /pooling and /classify."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence

from .....ipc.codec import JsonObject
from .....ipc.errors import RequestError
from .....ipc.messages.base import BulkArray
from .....ipc.params.pooling_params import PoolingParams
from ....forms.openai.errors import encode_json
from ....forms.openai.params import given_params
from ....forms.openai.prompts import prompt_submits
from ....forms.openai.vectors import packed
from ....forms.pooling.pooling_body import ClassificationRequest, PoolingRequest
from ...bodies.body_parser import ParsedBody
from ..openai.embeddings import with_chat
from ..openai.local_engine import LocalEngine
from ..openai.slices import in_slices
from .pooled_results import PooledResults, new_id


class Pooling(PooledResults):
    """Response with the results of one task. Created by `start`."""

    def __init__(self, engine: LocalEngine, parsed: ParsedBody[PoolingRequest], model: str) -> None:
        body = parsed.body
        self.prompt_field = "input" if body.messages is None else "messages"
        if body.encoding_format in ("bytes", "bytes_only"):
            raise RequestError("encoding_format must be float or base64 here: /v1/embeddings sends bytes")
        self._is_packed = body.encoding_format == "base64"
        self._form = body.embed_dtype or "float32", body.endianness or "native"
        pooling = PoolingParams(
            task=body.task,
            method=body.pooling,
            use_activation=body.normalize if body.use_activation is None else body.use_activation,
            dimensions=body.dimensions,
            step_tag_id=body.step_tag_id,
            returned_token_ids=body.returned_token_ids,
            prompt_name=body.prompt_name,
        )
        request_id = new_id("pool", body.request_id)
        params = given_params(body, max_tokens=1)
        submits = prompt_submits(request_id, parsed.inputs, params, body.add_special_tokens, pooling)
        super().__init__(engine, model, request_id, submits)

    @classmethod
    async def start(cls, engine: LocalEngine, parsed: ParsedBody[PoolingRequest], model: str) -> Pooling:
        """Check all fields and, for a chat, make the prompt; return the response. `whole` starts the work."""
        return cls(engine, await with_chat(engine, parsed), model)

    async def whole(self) -> bytes:
        with self.run() as run:
            found = await self.results(run)
            data = await in_slices(
                {"index": index, "object": "pooling", "data": self._encoded(each)} for index, each in enumerate(found)
            )
            return encode_json(self._head("list") | {"data": data, "usage": self.usage(run)})

    def _encoded(self, result: BulkArray) -> object:
        if not self._is_packed:
            return result.numbers()
        return base64.b64encode(packed(array("f", result.data), *self._form)).decode()


class Classification(PooledResults):
    """Response with the classes of each prompt. Created by `start`."""

    def __init__(
        self, engine: LocalEngine, parsed: ParsedBody[ClassificationRequest], model: str, labels: Sequence[str]
    ) -> None:
        """`labels`: the names of the classes."""
        body = parsed.body
        self._labels = labels
        self.prompt_field = "input" if body.messages is None else "messages"
        pooling = PoolingParams(task="classify", use_activation=body.use_activation)
        request_id = new_id("classify", body.request_id)
        params = given_params(body, max_tokens=1)
        submits = prompt_submits(request_id, parsed.inputs, params, body.add_special_tokens, pooling)
        super().__init__(engine, model, request_id, submits)

    @classmethod
    async def start(
        cls, engine: LocalEngine, labels: Sequence[str], parsed: ParsedBody[ClassificationRequest], model: str
    ) -> Classification:
        """Check all fields and, for a chat, make the prompt; return the response. `whole` starts the work."""
        return cls(engine, await with_chat(engine, parsed), model, labels)

    async def whole(self) -> bytes:
        with self.run() as run:
            found = await self.results(run)
            data = await in_slices(self._entry(index, each) for index, each in enumerate(found))
            return encode_json(self._head("list") | {"data": data, "usage": self.usage(run)})

    def _entry(self, index: int, result: BulkArray) -> JsonObject:
        probs = result.floats().tolist()
        likeliest = max(range(len(probs)), key=probs.__getitem__)
        return {"index": index, "label": self._labels[likeliest], "probs": probs, "num_classes": len(probs)}
