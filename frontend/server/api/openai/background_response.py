"""BackgroundResponse: a response that is generated in the background and survives restarts of the frontend.

Events are stored before they are sent. After a restart the new frontend generates the same answer again from the stored
seed, and stores and sends only the events that are not stored yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec

from .....ipc.codec import JsonObject
from .....ipc.errors import Overloaded, RequestError, TokenloomError
from ....forms.openai.errors import HttpError, encode_json
from ....forms.openai.items import Event
from ....state.responses import ResponseStore
from ..continuation import current
from ..keep_alive import COMMENT
from .responses import ResponseCreation, encode_events

logger = logging.getLogger("tokenloom.http")

OPEN = ("queued", "in_progress")


class BackgroundResponse:
    """Response that is generated whether a client waits or not. `response` is its newest state; one task executes
    `run`."""

    task: asyncio.Task[None]

    def __init__(
        self,
        store: ResponseStore,
        response: dict[str, Any],
        start: Callable[[], Awaitable[ResponseCreation]],
        stored: list[bytes] | None,
    ) -> None:
        """`start` creates the ResponseCreation to run. `stored`: the events stored so far; None if the response is not
        a stream."""
        self._store, self.response, self._start, self._events = store, response, start, stored
        self._is_over = False
        self._publish_lock = asyncio.Lock()
        self._changed = asyncio.Event()  # set, and replaced, after each change

    async def whole(self) -> bytes:
        """Return the response in its present state (JSON) without waiting for its end, since clients poll."""
        return encode_json(self.response)

    def events(self) -> AsyncGenerator[bytes, None]:
        return self.follow(-1)

    def end(self) -> bytes:
        """Return the events after those of `events`: none."""
        return b""

    def idle(self) -> bytes:
        """Return the bytes for times without events."""
        return COMMENT

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events after sequence number `after` (-1: all events) until the stream ends. RequestError
        if the response is not a stream."""
        if self._events is None:
            raise RequestError("stream needs a response that was created with stream true: ask for it as a whole")
        continuation = current()
        position = after + 1 + continuation.num_events
        while True:
            changed = self._changed
            if position < len(self._events):
                chunk, position = b"".join(self._events[position:]), len(self._events)
                continuation.num_events = position - after - 1
                yield chunk
            elif self._is_over:
                return
            else:
                await changed.wait()

    async def cancel(self) -> None:
        """Stop generating and mark the response cancelled, unless it has ended."""
        self.task.cancel()
        await asyncio.wait([self.task])
        await self._end("cancelled")

    async def run(self) -> None:
        """Generate the response; try again while the engine refuses the prompt as overloaded. Any other error ends the
        response as failed. If the task is cancelled, other than by `cancel`, the response stays open, and the next
        frontend continues it."""
        unsent = _UnsentEvents(self._events or ())
        has_begun = False
        try:
            creation = await self._start()
            while not self._is_over:
                try:
                    async for turn in creation.progress():
                        has_begun = True
                        await asyncio.shield(self._publish([each for event in turn for each in unsent.of(event)]))
                    self.finish()
                except Overloaded as error:
                    if has_begun:  # of the store: `creation` cannot start over
                        raise
                    await asyncio.sleep(error.retry_after_s)
        except Exception as error:
            if not isinstance(error, (HttpError, TokenloomError)):
                logger.exception("a response in the background failed")
            code = "invalid_prompt" if isinstance(error, (HttpError, RequestError)) else "server_error"
            await self._end("failed", {"code": code, "message": str(error)})

    def finish(self) -> None:
        """Mark the response as ended: nothing more is generated."""
        self._is_over = True
        self._changed.set()

    async def _end(self, status: str, error: JsonObject | None = None) -> None:
        """End the response with `status` and an event of type response.failed, unless it has ended already."""
        try:
            ended = self.response | {"status": status, "error": error}
            await self._publish([("response.failed", {"response": ended})])
        except TokenloomError as broken:
            logger.warning("the end of a response is not stored: %s", broken)
        self.finish()

    async def _publish(self, events: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Store events and the newest response that they hold, then show both to followers. Do nothing if the response
        has ended."""
        async with self._publish_lock:
            if self.response["status"] not in OPEN:
                return
            changes = [fields["response"] for _, fields in events if "response" in fields]
            response, first = changes[-1] if changes else self.response, len(self._events or ())
            encoded = [] if self._events is None else list(encode_events(events, first))
            if changes or encoded:
                new, is_open = encode_json(response) if changes else b"", response["status"] in OPEN
                await self._store.update(response["id"], new, is_open=is_open, first=first, events=encoded)
            self.response = response
            if self._events is not None:
                self._events += encoded
            self._changed.set()
            self._changed = asyncio.Event()


class _UnsentEvents:
    """Filter for the events of an answer that is generated again; it drops those already stored. The new answer has the
    same text, but the text may be cut into deltas at other places."""

    def __init__(self, stored: Sequence[bytes]) -> None:
        bodies = [msgspec.json.decode(event.partition(b"\ndata: ")[2]) for event in stored]
        self._num_characters = sum(len(body["delta"]) for body in bodies if "delta" in body)
        self._num_others = sum("delta" not in body for body in bodies)

    def of(self, event: tuple[str, dict[str, Any]]) -> Iterator[Event]:
        """Yield the event unless it is stored. Of a delta yield only the part of the text that is not stored."""
        kind, fields = event
        if "delta" not in fields:
            self._num_others -= 1
            if self._num_others < 0:
                yield event
            return
        num_sent, self._num_characters = self._num_characters, max(0, self._num_characters - len(fields["delta"]))
        if num_sent < len(fields["delta"]) or not num_sent:
            yield kind, {**fields, "delta": fields["delta"][num_sent:]}
