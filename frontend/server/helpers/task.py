"""Task and Reply: coroutines that go on inside the callbacks of jobs, without an event loop or in one.

`run` lets a coroutine run until it awaits a reply that is not there yet; it goes on inside the callback that brings the
reply. So work that never waits is over when `run` returns, and a test brings replies by hand. Closing a task closes its
coroutine where it waits: its `finally` blocks release what it holds. Knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeAlias, TypeVar

from ....ipc.errors import InternalError, TokenloomError
from ....ipc.shortages.failure import failure_of

T = TypeVar("T")
J = TypeVar("J")

logger = logging.getLogger("tokenloom.frontend")

Then: TypeAlias = Callable[[T | TokenloomError], None]  # callback of a job


class Reply(Generic[T]):
    """The outcome of a job, awaited by one coroutine. `bring` is the callback of the job.

    Invariant: an outcome that has been awaited is kept no longer, since the traceback of an error refers to this reply.
    """

    __slots__ = ("_is_there", "_outcome", "task")

    _outcome: T | TokenloomError

    def __init__(self) -> None:
        self._is_there = False
        self.task: Task | None = None  # that waits for the outcome

    def bring(self, outcome: T | TokenloomError) -> None:
        """Set the outcome, which lets the task that waits go on. Ignored after the first time."""
        if self._is_there:
            return
        self._outcome = outcome
        self._is_there = True
        if self.task is not None:
            self.task.go_on()

    def __await__(self) -> Generator[Reply[T], None, T]:
        if not self._is_there:
            yield self
        outcome = self._outcome
        del self._outcome
        if isinstance(outcome, TokenloomError):
            try:
                raise outcome
            finally:
                del outcome  # its traceback refers to this frame
        return outcome


Work: TypeAlias = Coroutine[Reply[Any], None, None]  # it handles its errors itself


class Task:
    """A coroutine that waits for a reply. Invariant: `_reply` is the reply that it waits for; None while it runs, and
    after its end."""

    __slots__ = ("_reply", "_work")

    def __init__(self, work: Work, reply: Reply[Any]) -> None:
        self._work = work
        self._reply: Reply[Any] | None = reply
        reply.task = self

    def go_on(self) -> None:
        """Resume the coroutine, whose reply has arrived, until it awaits another reply or ends."""
        self._reply = None
        try:
            reply = self._work.send(None)
        except StopIteration:
            return
        self._reply = reply
        reply.task = self

    def close(self) -> None:
        """Close the coroutine where it waits; a reply that comes later is ignored. If the coroutine is running, the
        call comes from within it, as it ends its request: it goes on."""
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.task = None
            self._work.close()


def run(work: Work) -> Task | None:
    """Run a coroutine until it waits for a reply, and return its task; None if it has ended already."""
    try:
        reply = work.send(None)
    except StopIteration:
        return None
    return Task(work, reply)


async def reply_of(start: Callable[[Then[T]], J], cancel: Callable[[J], None]) -> T:
    """Start a job, which calls back once with its outcome, now or later; return its result or raise its error. `cancel`
    ends the job if the coroutine is closed meanwhile, and ignores one that has ended."""
    reply: Reply[T] = Reply()
    job = start(reply.bring)
    try:
        return await reply
    finally:
        cancel(job)


async def in_event_loop(work: Awaitable[T]) -> T:
    """Return the result of `work`, an awaitable for tasks of the frontend, to a coroutine of the event loop, or raise
    its error as a TokenloomError (`error_of`). If the coroutine is cancelled, close the frontend's task."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    task = run(_settle(future, work))
    try:
        return await future
    finally:
        if task is not None:
            task.close()
        del future, task  # they hold an error, whose traceback holds this frame


async def _settle(future: asyncio.Future[T], work: Awaitable[T]) -> None:
    outcome: T | TokenloomError
    try:
        outcome = await work
    except Exception as error:
        outcome = error_of(error)
    if future.done():
        return  # the handler was cancelled just before
    if isinstance(outcome, TokenloomError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def error_of(error: Exception) -> TokenloomError:
    """Convert an error of work on one request to a TokenloomError without a traceback, whose frames hold the request's
    text. Call it in the `except` block. A shortage becomes Overloaded; a bug is logged and becomes an InternalError, so
    that the thread and the requests of others go on."""
    failure = failure_of(error, "the request could not be carried out")
    if isinstance(failure, InternalError) and failure is not error:
        logger.exception("work on a request failed")
    return failure.with_traceback(None)
