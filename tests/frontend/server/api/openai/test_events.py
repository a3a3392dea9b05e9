"""TextEvents encodes the same events as `event`; a stream that fails after its begin tells client and log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tokenloom.frontend.server.api.openai.events import DONE, EventStream, TextEvents, event
from tokenloom.ipc.errors import EngineDead


@pytest.mark.parametrize("text", ["", "a", 'a "quoted" \\ line\n', "\0text\0", "漢字 😀", "\u2028 \x7f </script>"])
def test_a_text_event_equals_the_encoded_body(text: str) -> None:
    def body(text: str) -> object:
        return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None}

    assert TextEvents(body).event(text) == event(body(text))


@pytest.mark.parametrize(("error", "is_logged"), [(KeyError("slot"), True), (EngineDead("worker 0 was killed"), False)])
def test_an_unexpected_error_of_a_begun_stream_is_an_event_and_logged(
    caplog: pytest.LogCaptureFixture, error: Exception, is_logged: bool
) -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise error

    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http"}
    asyncio.run(asyncio.wait_for(EventStream(chunks(), lambda: DONE)(scope, receive, send), timeout=10))
    _, first, failure = sent
    assert first == b"data: 1\n\n" and str(error).encode() in failure and failure.endswith(DONE)
    assert [record.exc_info is not None for record in caplog.records] == [True] * is_logged
