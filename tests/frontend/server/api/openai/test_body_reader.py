"""BodyReader refuses bodies by size before it decodes them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from tokenloom.frontend.forms.openai.errors import HttpError
from tokenloom.frontend.forms.openai.schema import AbortRequest, CompletionRequest
from tokenloom.frontend.forms.prompt_limits import PromptLimits
from tokenloom.frontend.server.api.openai.body_reader import BodyReader
from tokenloom.frontend.server.bodies.body_parser import SMALL_BYTES
from tokenloom.frontend.server.helpers.intake import new_intake_helper
from tokenloom.frontend.server.helpers.pool import HelperPool
from tokenloom.ipc.errors import Overloaded
from tokenloom.tests.support.engine_specs import new_spec


def read(reader: BodyReader, body_type: type[msgspec.Struct], *chunks: bytes) -> msgspec.Struct:
    coming: list[Message] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    coming.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        return coming.pop(0)

    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    return asyncio.run(reader.read(request, body_type)).body


def new_reader(**options: int) -> BodyReader:
    pool = HelperPool(lambda: None, lambda: new_intake_helper(new_spec()))
    return BodyReader(pool, PromptLimits.of(new_spec(), None), **options)


def test_a_small_body_may_come_in_chunks() -> None:
    assert read(new_reader(), AbortRequest, b'{"request', b'_id":', b' "x"}') == AbortRequest(request_id="x")
    with pytest.raises(HttpError, match="the body is empty"):
        read(new_reader(), AbortRequest)


def test_the_bytes_of_all_held_bodies_are_limited() -> None:
    reader = new_reader(max_held_bytes=100)
    for _ in range(3):
        with pytest.raises(Overloaded, match=r"101 bytes of HTTP bodies are held .* at most 100 .* ask again"):
            read(reader, CompletionRequest, b"x" * 50, b"x" * 51, b"x" * 50)
        with pytest.raises(HttpError, match="the body cannot be read"):
            read(reader, CompletionRequest, b"x" * 50, b"x" * 50)


def test_other_endpoints_refuse_large_bodies() -> None:
    with pytest.raises(HttpError, match=f"the body has {SMALL_BYTES + 1} bytes, at most {SMALL_BYTES}") as caught:
        read(new_reader(), AbortRequest, b" " * (SMALL_BYTES + 1))
    assert caught.value.status == 413
