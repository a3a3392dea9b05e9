"""What the Gate does with a request that never comes whole."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from tokenloom.frontend.server_endpoint import read_body
from tokenloom.frontend.server_gate import Gate


async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    await read_body(Request(scope, receive), msgspec.Struct)


def test_a_client_that_leaves_in_the_midst_of_its_body_is_neither_answered_nor_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arriving: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return arriving.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    with caplog.at_level(logging.DEBUG):
        asyncio.run(Gate(endpoint, None, 100, lambda why: None)(scope, receive, send))
    assert (arriving, sent) == ([], [])
    assert [record for record in caplog.records if record.name.startswith("tokenloom")] == []
