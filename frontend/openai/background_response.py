"""BackgroundResponse: a response that is made whether or not somebody waits for it, by one frontend after another.

What it has told is stored before anybody gets it. A frontend that goes on after another makes the same answer again,
since its seed is stored, and tells only what is new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec

from ...ipc.codec import JsonObject
from ...ipc.errors import Overloaded, RequestError, TokenloomError
from .forms.errors import HttpError, encode_json
from .forms.items import Event
from .response_store import ResponseStore
from .responses import ResponseCreation, encode_events

logger = logging.getLogger("tokenloom.http")

OPEN = ("queued", "in_progress")


class BackgroundResponse:
    """`response` is its newest form; `run` is one task's."""

    stream_end = b""
    task: asyncio.Task[None]

    def __init__(
        self,
        store: ResponseStore,
        response: dict[str, Any],
        start: Callable[[], Awaitable[ResponseCreation]],
        told: list[bytes] | None,
    ) -> None:
        """`told`: the events that are stored, None if nobody wants any."""
        self._store, self.response, self._start, self._told = store, response, start, told
        self._is_over = False
        self._telling = asyncio.Lock()
        self._news = asyncio.Event()  # another one after each piece of news

    async def whole(self) -> bytes:
        """As it is now: its caller comes again."""
        return encode_json(self.response)

    def events(self) -> AsyncGenerator[bytes, None]:
        return self.follow(-1)

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """The events behind number `after`, to the end."""
        if self._told is None:
            raise RequestError("stream needs a response that was created with stream true: ask for it as a whole")
        position = after + 1
        while True:
            news = self._news
            if position < len(self._told):
                chunk, position = b"".join(self._told[position:]), len(self._told)
                yield chunk
            elif self._is_over:
                return
            else:
                await news.wait()

    async def cancel(self) -> None:
        """End it where it is, unless it has ended."""
        self.task.cancel()
        await asyncio.wait([self.task])
        await self._end("cancelled")

    async def run(self) -> None:
        """Make it. If this is cancelled, it stays open: the next frontend goes on."""
        unheard = _Unheard(self._told or ())
        try:
            creation = await self._start()
            while not self._is_over:
                try:
                    async for turn in creation.progress():
                        await asyncio.shield(self._tell([each for event in turn for each in unheard.of(event)]))
                    self._finish()
                except Overloaded as error:  # comes before anything else: the response stays queued
                    await asyncio.sleep(error.retry_after_s)
        except Exception as error:
            if not isinstance(error, (HttpError, TokenloomError)):
                logger.exception("a response in the background failed")
            code = "invalid_prompt" if isinstance(error, (HttpError, RequestError)) else "server_error"
            await self._end("failed", {"code": code, "message": str(error)})

    def _finish(self) -> None:
        self._is_over = True
        self._news.set()

    async def _end(self, status: str, error: JsonObject | None = None) -> None:
        """Without the whole answer."""
        try:
            ended = self.response | {"status": status, "error": error}
            await self._tell([("response.failed", {"response": ended})])
        except TokenloomError as broken:
            logger.warning("the end of a response is not stored: %s", broken)
        self._finish()

    async def _tell(self, events: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Store events, and the response that the last of them may hold, and then show them. Nothing comes after the
        end."""
        async with self._telling:
            if self.response["status"] not in OPEN:
                return
            changes = [fields["response"] for _, fields in events if "response" in fields]
            response, first = changes[-1] if changes else self.response, len(self._told or ())
            encoded = [] if self._told is None else list(encode_events(events, first))
            if changes or encoded:
                new, is_open = encode_json(response) if changes else b"", response["status"] in OPEN
                await self._store.update(response["id"], new, is_open=is_open, first=first, events=encoded)
            self.response = response
            if self._told is not None:
                self._told += encoded
            self._news.set()
            self._news = asyncio.Event()


class _Unheard:
    """Of the events of an answer that is made again, what was not told the first time, when its text may have come in
    other pieces."""

    def __init__(self, told: Sequence[bytes]) -> None:
        bodies = [msgspec.json.decode(event.partition(b"\ndata: ")[2]) for event in told]
        self._num_characters = sum(len(body["delta"]) for body in bodies if "delta" in body)
        self._num_others = sum("delta" not in body for body in bodies)

    def of(self, event: tuple[str, dict[str, Any]]) -> Iterator[Event]:
        """The event, the rest of its text, or nothing."""
        kind, fields = event
        if "delta" not in fields:
            self._num_others -= 1
            if self._num_others < 0:
                yield event
            return
        heard, self._num_characters = self._num_characters, max(0, self._num_characters - len(fields["delta"]))
        if heard < len(fields["delta"]) or not heard:
            yield kind, {**fields, "delta": fields["delta"][heard:]}
