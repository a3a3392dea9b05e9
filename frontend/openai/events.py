"""EventStream: server-sent events, one write for all that a turn brought, and nothing after a disconnect.

The first chunk is awaited before the headers go out, so that a request which is refused gets its status: until then
errors are raised. An error after that is an event. No task groups and no per-chunk objects: this is the path of every
token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .forms.errors import encode_json, to_http_error

T = TypeVar("T")

SERVER_SEND = "tokenloom.send"  # in a scope: the server's own send, for bodies whose head has gone out
DONE = b"data: [DONE]\n\n"
_MARK = "\0text\0"  # nothing else in a body holds a NUL: names and ids are printable
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


def event(body: object) -> bytes:
    """One event of the chat and completions streams."""
    return b"data: " + encode_json(body) + b"\n\n"


class TextEvents:
    """The events of one choice that differ in their text alone: the rest of them is encoded once."""

    def __init__(self, body: Callable[[str], object]) -> None:
        """`body` makes such an event's body of its text, and holds the text once."""
        self._head, self._tail = event(body(_MARK)).split(encode_json(_MARK))

    def event(self, text: str) -> bytes:
        """What `event` makes of the body with this text."""
        return self._head + encode_json(text) + self._tail


class EventStream(Response):
    """Sends what `chunks` yields: bytes of whole events. A client that goes away ends the generator at once."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], end: bytes) -> None:
        self._chunks = chunks
        self._end = end
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._chunks):
            try:
                first = await anext(self._chunks)
            except StopAsyncIteration:
                first = b""
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            send = scope.get(SERVER_SEND, send)
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                await send({"type": "http.response.body", "body": event(to_http_error(error).body), "more_body": True})
            await send({"type": "http.response.body", "body": self._end, "more_body": False})


async def until_disconnect(receive: Callable[[], Awaitable[object]], work: Coroutine[object, object, T]) -> T | None:
    """The result of `work`; None if the client went away first, and then `work` has been cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, watcher):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _wait_disconnect(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message.get("type") == "http.disconnect":
            return
