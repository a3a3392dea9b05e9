"""RequestFuture: a concurrent.futures.Future of a RequestOutput; `cancel()` aborts the request."""

from __future__ import annotations

import threading
from concurrent.futures import Future, TimeoutError
from queue import Empty, SimpleQueue
from time import monotonic

from ...ipc.messages.client import Submit
from .open_request import Update
from .outputs import OutputBuilder, RequestOutput
from .transport import Transport


class RequestFuture(Future[RequestOutput]):
    """The future of one request, pending until the request ends. Its callbacks do not run in the transport's thread.

    If the engine is in this process, only `result` and `exception` run the engine; concurrent.futures.wait would hang.
    """

    def __init__(self, transport: Transport, submit: Submit) -> None:
        super().__init__()
        self.request_id = submit.request_id
        self._transport = transport
        self._builder = OutputBuilder(submit)
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._claim = threading.Lock()  # acquired once: by `cancel` or by `_settle`

    def add(self, update: Update) -> None:
        """Add an update: this is the request's sink. The last update settles the future, outside the transport's
        thread."""
        self._builder.add(update)
        if self._builder.is_finished:
            self._ended.put(None)
            self._transport.call_later(self._settle)

    def cancel(self) -> bool:
        """Abort the request and cancel the future; False if the request has ended already."""
        if not self._claim.acquire(blocking=False):
            return self.cancelled()
        super().cancel()
        self.set_running_or_notify_cancel()
        self._transport.cancel(self.request_id)
        self._ended.put(None)
        return True

    def result(self, timeout: float | None = None) -> RequestOutput:
        return super().result(self._wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._wait(timeout))

    def _wait(self, timeout_s: float | None) -> float | None:
        """Wait for the end of the request with Transport.wait; return the rest of the timeout. TimeoutError if the
        request has not ended after `timeout_s`."""
        if self.done():
            return timeout_s
        begin = monotonic()
        try:
            self._transport.wait(self._ended, timeout_s)
        except Empty:
            raise TimeoutError from None
        self._ended.put(None)  # for other threads that wait
        return None if timeout_s is None else max(0.0, timeout_s - (monotonic() - begin))

    def _settle(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        self.set_running_or_notify_cancel()
        if self._builder.error is not None:
            self.set_exception(self._builder.error)
        else:
            self.set_result(self._builder.build())
