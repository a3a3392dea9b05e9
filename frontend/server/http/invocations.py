"""Invocations: SageMaker's single path for every endpoint that takes JSON, and the root of TEI for models that pool.

The fields of the body choose the endpoint, as the tables below list. A model that generates nothing answers `input` and
`messages` by its own task. Only the first SMALL_BYTES of the body are searched, so that a large body is still decoded
in an intake process.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from ....ipc.codec import JSON_STRING
from ....ipc.params.pooling_params import PoolingTask
from ....ipc.spec.models.model_config import ModelConfig
from ...forms.openai.errors import HttpError
from ..bodies.body_parser import SMALL_BYTES
from .endpoint import Endpoint

PAIRED = {"query": "/rerank", "queries": "/score", "text_1": "/score", "data_1": "/score"}
GENERATING = {  # the first match decides: a chat to embed has messages too
    "encoding_format": "/v1/embeddings",
    "dimensions": "/v1/embeddings",
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    **PAIRED,
}
_TOKEN = re.compile(rf"({JSON_STRING})(\s*:)?|[{{}}\[\]]".encode())


class Invocations:
    """Handler that passes each request to one of the given endpoints, chosen by the fields of its body."""

    def __init__(self, endpoints: list[Endpoint], model: ModelConfig) -> None:
        self._by_path: Mapping[str, Endpoint] = {each.path: each for each in endpoints}
        self._is_pooling = not model.is_generative
        self._path_by_field = pooling_paths(model.pooling.tasks) if self._is_pooling else GENERATING

    def endpoints(self) -> list[Endpoint]:
        paths = ["/invocations", "/"] if self._is_pooling else ["/invocations"]
        return [Endpoint(path, self.answer, other_method="POST") for path in paths]

    async def answer(self, request: Request) -> Response:
        received: list[Message] = []
        head = b""
        while len(head) < SMALL_BYTES:
            message = await request.receive()
            received.append(message)
            head += message.get("body", b"")
            if not message.get("more_body", False):
                break
        fields = top_level_fields(head[:SMALL_BYTES])
        path = next((path for field, path in self._path_by_field.items() if field in fields), None)
        if path is None:
            listed = ", ".join(f"{field} for {path}" for field, path in self._path_by_field.items())
            raise HttpError(400, f"the first {SMALL_BYTES} bytes of the body name no endpoint: give {listed}")
        received.reverse()

        async def receive() -> Message:
            return received.pop() if received else await request.receive()

        return await self._by_path[path].answer(Request(request.scope, receive))


def pooling_paths(tasks: Collection[PoolingTask]) -> dict[str, str]:
    """Return the path for each field of a body, of a model that generates nothing and serves `tasks`. The first match
    decides: `inputs` is TEI's, and its clients send an encoding_format, too."""
    if "embed" in tasks:
        tei, own = "/embed", "/v1/embeddings"
    elif "classify" in tasks:
        tei, own = "/predict", "/classify"
    else:
        tei, own = "/pooling", "/pooling"
    return {"inputs": tei, **PAIRED, "input": own, "messages": own}


def top_level_fields(head: bytes) -> set[str]:
    """Return the field names of the outermost object in the first bytes of a JSON text."""
    depth, fields = 0, set()
    for token in _TOKEN.finditer(head):
        if token[0] in (b"{", b"["):
            depth += 1
        elif token[0] in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and token[2]:
            fields.add(token[1][1:-1].decode(errors="replace"))
    return fields
