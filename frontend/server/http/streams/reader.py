"""StreamReader: the connection of a stream's reader: its parts get ids, and the run does not notice that it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive, Send

from ...api.continuation import SHOWN, TOKENS, Shown
from .stream import Position, ResumableStream

ID_HEADER = b"x-stream-id"
END = "end"  # position after the last event


class StreamReader:
    """ASGI channel of one run of a stream. `position`: behind the parts that were sent."""

    def __init__(
        self,
        stream: ResumableStream,
        position: Position,
        receive: Receive,
        send: Send,
        send_part: Send,
        on_begin: Callable[[ResumableStream], None],
        on_left: Callable[[ResumableStream], None],
        *,
        is_first: bool,
    ) -> None:
        """`on_begin` is called before the head of an event stream is sent, `on_left` once the client has left.
        `is_first`: the body of the request is not known yet."""
        self._stream, self._position = stream, position
        self._receive, self._send, self._send_part = receive, send, send_part
        self._on_begin, self._on_left, self._is_first = on_begin, on_left, is_first
        self.is_stream = False
        self._has_ended = False

    async def receive(self) -> Message:
        """Receive the body; the client's leaving only once the stream is to end."""
        leaving = asyncio.ensure_future(self._stream.leave.wait())
        message = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((leaving, message), return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                return {"type": "http.disconnect"}
            received = message.result()
            if received["type"] == "http.request" and self._is_first:
                self._stream.request.body += received.get("body", b"")
            if received["type"] == "http.disconnect" and self.is_stream:
                self._on_left(self._stream)
                await leaving
            return received
        finally:
            leaving.cancel()
            message.cancel()

    async def send(self, message: Message) -> None:
        """Send the head, and answers that are no event streams as they are."""
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            self.is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            if self.is_stream:
                self._on_begin(self._stream)
                message["headers"] = [*message["headers"], (ID_HEADER, self._stream.id.encode())]
        await self._send(message)

    async def send_part(self, message: Message) -> None:
        """Send a part of the stream; its last event gets the position as its id."""
        shown: Shown | None = message.get(SHOWN)
        if shown is not None and message["type"] != TOKENS:
            is_new = bool(shown.tokens or shown.ended or shown.num_events > self._position.num_events)
            has_events = is_new or not message["more_body"]
            self._stream.add(shown, self._position)
            place = str(self._position)
            if not message["more_body"]:
                place, self._has_ended = END, True
            if has_events:
                message = {**message, "body": _with_id(message["body"], f"{self._stream.id}/{place}")}
        await self._send_part(message)

    async def close(self) -> None:
        """End the body of a reader whose stream goes on elsewhere."""
        if self.is_stream and not self._has_ended:
            await self._send_part({"type": "http.response.body", "body": b"", "more_body": False})


def _with_id(part: bytes, event_id: str) -> bytes:
    """Return events, the last one with an id."""
    if not part:
        return part
    start = part.rfind(b"\n\n", 0, -2) + 2 if part.count(b"\n\n") > 1 else 0
    return b"%bid: %b\n%b" % (part[:start], event_id.encode(), part[start:])
