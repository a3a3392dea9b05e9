"""EventStream: a response of server-sent events, with one write per turn (loop iteration) of the frontend.

The headers are sent with the first chunk, or before it if a stream is silent for long: an error before them is raised
and sets the status, a later error becomes an event. A disconnect of the client ends the stream. The code avoids task
groups and objects per chunk, because every token takes this path.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ....forms.openai.errors import HttpError, encode_json, stream_error
from ..continuation import SHOWN, TOKENS, Shown, current
from ..keep_alive import COMMENT, KEEP_ALIVE, KeepAlive

T = TypeVar("T")

SERVER_SEND = "tokenloom.send"  # key in a scope: the server's own send function, to be used after the headers
DONE = b"data: [DONE]\n\n"
_MARK = "\0text\0"  # placeholder that occurs nowhere else, since names and ids are printable
_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
)


def event(body: object, kind: str = "") -> bytes:
    """Return one encoded event; `kind`, if given, is its name."""
    name = b"event: " + kind.encode() + b"\n" if kind else b""
    return name + b"data: " + encode_json(body) + b"\n\n"


class TextEvents:
    """Encoder for the events of one choice that differ only in their text; everything else is encoded once."""

    def __init__(self, body: Callable[[str], object]) -> None:
        """`body` returns the body of an event with the given text, which must occur in it exactly once."""
        self._head, self._tail = event(body(_MARK)).split(encode_json(_MARK))

    def event(self, text: str) -> bytes:
        """Return the encoded event with this text."""
        return self._head + encode_json(text) + self._tail


class EventStream(Response):
    """Response that sends `chunks`, each one or more whole events, and then the `end`. A disconnect closes `chunks` at
    once. Chunks that are made while the request's continuation is muted are not sent. After the head an error is an
    event."""

    headers_sent = _HEADERS

    @staticmethod
    def encode_error(error: HttpError) -> bytes:
        """Encode the error that ends a stream."""
        return event(error.body)

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], end: Callable[[], bytes], idle: Callable[[], bytes] = lambda: COMMENT
    ) -> None:
        """`end` is called after the last chunk; it may return no bytes. `idle` returns bytes for times without events;
        none: nothing is sent."""
        self._chunks = chunks
        self._end, self._idle = end, idle
        self._continuation = current()
        self._has_head = False
        self.num_parts = 0
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._serve(scope, send))

    async def _serve(self, scope: Scope, send: Send) -> None:
        self._send, self._send_part = send, scope.get(SERVER_SEND, send)
        keep_alive = scope.get(KEEP_ALIVE) or KeepAlive(0)
        continuation, failure = self._continuation, b""
        async with contextlib.aclosing(self._chunks):
            with keep_alive.watching(self):
                try:
                    async for chunk in self._chunks:
                        if continuation.is_muted:
                            continue
                        if not self._has_head:
                            await self._begin()
                        self.num_parts += 1
                        await self._send_part(self._part(chunk))
                except Exception as error:
                    if not continuation.is_resumed:
                        raise
                    failure = self.encode_error(stream_error(error))
            if not self._has_head:
                await self._begin()
            await self._send_part(self._part(failure + self._end(), has_more=False))

    async def _begin(self) -> None:
        """Send the head."""
        self._has_head = self._continuation.is_resumed = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(self.headers_sent)})

    def _part(self, body: bytes, *, has_more: bool = True) -> Message:
        part: Message = {"type": "http.response.body", "body": body, "more_body": has_more}
        if self._continuation.is_kept:
            part[SHOWN] = self._continuation.take_shown()
        return part

    async def fill_silence(self) -> None:
        """Send the bytes for times without events; they show nothing."""
        idle = self._idle()
        if not idle:
            return
        if not self._has_head:
            await self._begin()
        self.num_parts += 1
        part: Message = {"type": "http.response.body", "body": idle, "more_body": True}
        if self._continuation.is_kept:
            part[SHOWN] = self._continuation.nothing_shown()
        await self._send_part(part)


def only_end(end: bytes = b"") -> EventStream:
    """Return a stream that has nothing but its end."""
    return EventStream(_no_chunks(), lambda: end)


async def _no_chunks() -> AsyncGenerator[bytes, None]:
    for chunk in list[bytes]():
        yield chunk


def report_tokens(scope: Scope) -> None:
    """Let the server know the tokens of the present request's answer, which is sent as a whole, as they are made."""
    continuation, send = current(), scope[SERVER_SEND]
    if not continuation.is_kept:
        return

    async def report(shown: Shown) -> None:
        await send({"type": TOKENS, SHOWN: shown})

    continuation.report = report


async def until_disconnect(receive: Callable[[], Awaitable[object]], work: Coroutine[object, object, T]) -> T | None:
    """Return the result of `work`; if the client disconnects first, cancel `work` and return None."""
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
        del task  # its error refers to this frame: break the cycle


async def _wait_disconnect(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message.get("type") == "http.disconnect":
            return
