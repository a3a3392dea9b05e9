"""AsyncStream: the updates of one request on their way from the channel's thread into an event loop.

The thread only appends; one wake-up per loop is pending at most, however many streams have news, so that a busy
engine does not flood the loop. A consumer that is slow finds all news merged into one cumulative output.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from ...ipc.messages.client import Submit
from .open_request import Update
from .outputs import OutputBuilder, RequestOutput


class LoopWaker:
    """Wakes the streams of one event loop. `notify` is called in the channel's thread, the rest in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._with_news: deque[AsyncStream] = deque()
        self._is_pending = False

    def notify(self, stream: AsyncStream) -> None:
        self._with_news.append(stream)
        if not self._is_pending:
            self._is_pending = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_pending = False  # before the queue is emptied: what comes later wakes again
        while self._with_news:
            self._with_news.popleft().wake()


class AsyncStream:
    """`put` is the request's sink; `next` belongs to one task."""

    def __init__(self, submit: Submit, waker: LoopWaker) -> None:
        self._waker = waker
        self._updates: deque[Update] = deque()
        self._has_news = False
        self._event = asyncio.Event()
        self._builder = OutputBuilder(submit)

    @property
    def is_finished(self) -> bool:
        return self._builder.is_finished

    def put(self, update: Update) -> None:
        self._updates.append(update)
        if not self._has_news:
            self._has_news = True
            self._waker.notify(self)

    def wake(self) -> None:
        self._event.set()

    async def next(self) -> RequestOutput | None:
        """The output with what has come, as output_kind asks; None if there is nothing to see yet. Raises the
        request's error."""
        await self._event.wait()
        self._event.clear()
        self._has_news = False  # before the queue is emptied: what comes later notifies again
        builder = self._builder
        num_tokens = builder.num_tokens
        while self._updates:
            builder.add(self._updates.popleft())
        if builder.error is not None:
            raise builder.error
        if builder.output_kind == "delta":
            return builder.build_delta() if builder.has_delta else None
        if builder.is_finished:
            return builder.build()
        return builder.build() if builder.num_tokens > num_tokens and builder.output_kind == "cumulative" else None
