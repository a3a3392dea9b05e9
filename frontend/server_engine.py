"""LocalEngine: the engine as the HTTP handlers see it: submit, await what comes, ask, abort.

A client of the Frontend in the same loop and the same process. One turn of the frontend wakes each stream that has
news once, with everything that the turn brought for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from ..ipc.errors import ErrorInfo, RequestError
from ..ipc.messages import Abort, Accepted, Delta, Deltas, FrontendMessage, Health, Submit
from .input_processor import InputProcessor
from .service import Frontend
from .trace_context import incoming_trace

News: TypeAlias = tuple[int, Accepted | Delta]  # the position of the submit, and what it got


class Stream:
    """What comes for the submits of one HTTP request. `take` belongs to one task."""

    def __init__(self, num_submits: int) -> None:
        self._news: list[News] = []
        self._waiter: asyncio.Future[None] | None = None
        self._num_open = num_submits

    def put(self, news: News, is_last: bool) -> None:
        self._news.append(news)
        self._num_open -= is_last
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_over(self) -> bool:
        """Every submit has ended, and what it got has been taken."""
        return not self._num_open and not self._news

    async def take(self) -> list[News]:
        """All news, at least one. Raises the error of a submit that failed."""
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._news = self._news, []
        for _, update in news:
            if isinstance(update, Delta) and update.finish_reason == "error":
                error = update.error or ErrorInfo("internal", "the request failed and the engine did not say why")
                raise error.to_exception()
        return news


class LocalEngine:
    """Invariant: a request id is here from its submit until its last answer has ended or `close` has let go of it."""

    def __init__(self, frontend: Frontend, wake: Callable[[], None]) -> None:
        """`wake` makes the frontend have a turn soon."""
        self._frontend = frontend
        self.wake = wake
        self._session = frontend.open_local(self._deliver)
        self._stream_by_id: dict[str, tuple[Stream, int]] = {}
        self._num_answers_by_id: dict[str, int] = {}

    @property
    def inputs(self) -> InputProcessor:
        return self._frontend.inputs

    def open(self, submits: Sequence[Submit], num_answers: int = 1) -> Stream:
        """Submit all, each for `num_answers`; close the stream whatever happens. RequestError for an id in use."""
        for submit in submits:
            if submit.request_id in self._stream_by_id:
                raise RequestError(f"request_id {submit.request_id} is open already: choose another")
        stream, trace = Stream(len(submits)), incoming_trace.get()
        for position, submit in enumerate(submits):
            self._stream_by_id[submit.request_id] = (stream, position)
            self._num_answers_by_id[submit.request_id] = num_answers
        for submit in submits:
            traced = msgspec.structs.replace(submit, **trace._asdict()) if trace.traceparent else submit
            self._frontend.on_local_message(self._session, traced)
        self.wake()
        return stream

    def close(self, submits: Sequence[Submit]) -> None:
        """Abort what is still open of these; nobody listens any more."""
        for submit in submits:
            if self._stream_by_id.pop(submit.request_id, None) is not None:
                del self._num_answers_by_id[submit.request_id]
                self._frontend.on_local_disconnect(self._session, submit.request_id)
                self.wake()

    def abort(self, request_id: str) -> int:
        """End a request, given by the id of its answer; its caller gets what there is. Returns how many submits."""
        found = [each for each in self._stream_by_id if each == request_id or each.rpartition("/")[0] == request_id]
        for each in found:
            self._frontend.on_local_message(self._session, Abort(request_id=each))
        if found:
            self.wake()
        return len(found)

    def health(self) -> Health:
        return self._frontend.health()

    def _deliver(self, message: FrontendMessage) -> None:
        if isinstance(message, Deltas):
            for delta in message.deltas:
                self._put(delta.request_id, delta, delta.finish_reason is not None)
        elif isinstance(message, Accepted):
            self._put(message.request_id, message, is_end=False)

    def _put(self, request_id: str, update: Accepted | Delta, is_end: bool) -> None:
        entry = self._stream_by_id.get(request_id)
        if entry is None:
            return  # closed: its caller is gone
        stream, position = entry
        if is_end:
            self._num_answers_by_id[request_id] -= 1
        is_last = is_end and (self._num_answers_by_id[request_id] <= 0 or _is_error(update))
        if is_last:
            del self._stream_by_id[request_id], self._num_answers_by_id[request_id]
        stream.put((position, update), is_last)


def _is_error(update: Accepted | Delta) -> bool:
    return isinstance(update, Delta) and update.finish_reason == "error"
