"""Invocations: SageMaker's single path for generation and embeddings.

The fields of the body choose the endpoint: `encoding_format` or `dimensions` embeddings (also of a chat), else
`messages` chat, else `prompt` completions, else `input` embeddings. Only the first SMALL_BYTES of the body are
searched, so that a large body is still decoded in an intake process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from ....ipc.codec import JSON_STRING
from ...forms.openai.errors import HttpError
from ..bodies.body_parser import SMALL_BYTES
from .endpoint import Endpoint

PATH_BY_FIELD = {  # the first match decides: a chat to embed has messages too
    "encoding_format": "/v1/embeddings",
    "dimensions": "/v1/embeddings",
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
}
_TOKEN = re.compile(rf"({JSON_STRING})(\s*:)?|[{{}}\[\]]".encode())


class Invocations:
    """Handler that passes each request to one of the given endpoints, chosen by the fields of its body."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self._by_path: Mapping[str, Endpoint] = {each.path: each for each in endpoints}

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("/invocations", self.answer, other_method="POST")]

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
        path = next((path for field, path in PATH_BY_FIELD.items() if field in fields), None)
        if path is None:
            listed = ", ".join(f"{field} for {path}" for field, path in PATH_BY_FIELD.items())
            raise HttpError(400, f"the first {SMALL_BYTES} bytes of the body name no endpoint: give {listed}")
        received.reverse()

        async def receive() -> Message:
            return received.pop() if received else await request.receive()

        return await self._by_path[path].answer(Request(request.scope, receive))


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
