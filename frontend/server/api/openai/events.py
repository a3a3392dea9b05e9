"""Send server-sent events: one write per turn (loop iteration) of the frontend, none after a disconnect.

The headers wait for the first chunk: an error before it is raised and sets the status, a later error is an event.
Without task groups and objects per chunk, because every token takes this path.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....forms.openai.errors import encode_json, stream_error

T = TypeVar("T")

SERVER_SEND = "tokenloom.send"  # key in a scope: the server's own send, for use after the headers
DONE = b"data: [DONE]\n\n"
_MARK = "\0text\0"  # unique: names and ids are printable
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
]


def event(body: object, kind: str = "") -> bytes:
    """Encode one event; `kind`, if given, is its name."""
    name = b"event: " + kind.encode() + b"\n" if kind else b""
    return name + b"data: " + encode_json(body) + b"\n\n"


class TextEvents:
    """Encoder of one choice's events that differ only in their text. The rest is encoded once."""

    def __init__(self, body: Callable[[str], object]) -> None:
        """`body` returns the body of an event, which holds the text exactly once."""
        self._head, self._tail = event(body(_MARK)).split(encode_json(_MARK))

    def event(self, text: str) -> bytes:
        """Encode the event with this text."""
        return self._head + encode_json(text) + self._tail


class EventStream(Response):
    """Response that sends `chunks`, bytes of whole events, and then `end`. A disconnect closes `chunks` at once."""

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
                await send({"type": "http.response.body", "body": event(stream_error(error).body), "more_body": True})
            await send({"type": "http.response.body", "body": self._end, "more_body": False})


async def until_disconnect(receive: Callable[[], Awaitable[object]], work: Coroutine[object, object, T]) -> T | None:
    """Return the result of `work`, or cancel it and return None if the client disconnects first."""
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
        del task  # its error holds this frame


async def _wait_disconnect(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message.get("type") == "http.disconnect":
            return
