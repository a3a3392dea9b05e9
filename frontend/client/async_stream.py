"""AsyncStream: passes the updates of one request from the transport's thread to an event loop.

However many streams have updates, at most one wake-up per loop is pending, so that a busy engine does not flood the
loop. Updates that a slow consumer has not fetched are merged into one output.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from ...ipc.messages.client import Submit
from .open_request import Update
from .outputs import OutputBuilder, RequestOutput, Tools


class LoopWaker:
    """Waker of the streams of one event loop. `notify` runs in the transport's thread, the rest in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._updated: deque[AsyncStream] = deque()
        self._is_pending = False

    def notify(self, stream: AsyncStream) -> None:
        self._updated.append(stream)
        if not self._is_pending:
            self._is_pending = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_pending = False  # before the queue is emptied: a later `notify` wakes again
        while self._updated:
            self._updated.popleft().wake()


class AsyncStream:
    """The outputs of one request. The transport's thread calls `put`, one task calls `next`."""

    def __init__(self, submit: Submit, waker: LoopWaker, tools: Tools | None = None) -> None:
        self._waker = waker
        self._updates: deque[Update] = deque()
        self._is_notified = False
        self._event = asyncio.Event()
        self._builder = OutputBuilder(submit, tools)

    @property
    def is_finished(self) -> bool:
        return self._builder.is_finished

    def put(self, update: Update) -> None:
        self._updates.append(update)
        if not self._is_notified:
            self._is_notified = True
            self._waker.notify(self)

    def wake(self) -> None:
        self._event.set()

    async def next(self) -> RequestOutput | None:
        """Wait for updates and return the next output, by the request's output_kind; None if there is nothing to return
        yet. Raise the request's error."""
        await self._event.wait()
        self._event.clear()
        self._is_notified = False  # before the queue is emptied: a later `put` notifies again
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
