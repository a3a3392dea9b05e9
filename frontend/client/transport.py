"""Transport: the interface between clients and an engine. Implementations use a socket, or an engine in this process.

A request is submitted with a sink. The sink gets the request's updates in order, and each token exactly once; the last
update is a Delta with a finish reason, or an error. `protocol.py` shows the route of a request.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from ...ipc.codec import encode
from ...ipc.errors import RequestError
from ...ipc.messages.client import ClientMessage, Query, Submit
from ...ipc.shortages.threads import start_thread
from ...ipc.sockets.zmq_sockets import MAX_CLIENT_MESSAGE_BYTES
from .open_request import OpenRequest, Sink
from .protocol import ClientProtocol, QuerySink

T = TypeVar("T")

logger = logging.getLogger("tokenloom.client")

CLOSE_TIMEOUT_S = 5.0  # how long `close` waits for user callbacks that still run


class Transport(ABC):
    """A connection to an engine. All methods may be called from any thread, but `wait` must not be called from a sink.

    Invariant: one thread at a time uses the ClientProtocol; other threads only queue commands for it.
    """

    addresses: Sequence[str] = ("this process",)  # of the engine

    def __init__(self, protocol: ClientProtocol) -> None:
        self._protocol = protocol
        self._commands: deque[Callable[[], None]] = deque()
        self._query_ids = itertools.count(1)

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Submit a request and return at once. `sink` gets its updates; the only update is RequestError if the id is in
        use, or Overloaded if MAX_OPEN_REQUESTS are open. RequestError is raised if the transport is closed."""
        self._command(partial(self._protocol.submit, OpenRequest(submit, sink)))

    def abort(self, request_id: str) -> None:
        """Abort a request; its sink gets a last delta with finish_reason abort for each answer that has not ended. An
        unknown id is ignored. RequestError if the transport is closed."""
        self._command(partial(self._protocol.abort, request_id))

    def cancel(self, request_id: str) -> None:
        """Abort a request and discard its further updates."""
        with contextlib.suppress(RequestError):  # the transport is closed, so the request has ended
            self._command(partial(self._protocol.cancel, request_id))

    def query(self, make_query: Callable[..., Query], sink: QuerySink) -> None:
        """Send the query that `make_query(query_id=…)` returns; `sink` gets its reply or error. RequestError if the
        transport is closed."""
        self._command(partial(self._protocol.query, make_query(query_id=next(self._query_ids)), sink))

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    @abstractmethod
    def _command(self, command: Callable[[], None]) -> None:
        """Queue a command and wake the thread that runs commands; RequestError if the transport is closed."""

    @abstractmethod
    def wait(self, queue: SimpleQueue[T], timeout_s: float | None = None) -> T:
        """Return the next item that a sink puts into `queue`; queue.Empty if there is none within `timeout_s`."""

    @abstractmethod
    def call_later(self, function: Callable[[], None]) -> None:
        """Run `function`, which may take long, later and outside the transport's thread."""

    @abstractmethod
    def close(self) -> None:
        """End every request with an error and free all resources. A second call does nothing.

        Wait at most CLOSE_TIMEOUT_S for a running callback; then log the name of its daemon thread and return, so that
        neither this call nor the end of the program hangs.
        """


def encode_client_message(message: ClientMessage) -> bytes:
    """Return a message as bytes; RequestError if it contains an invalid value or is too large."""
    try:
        frame = encode(message)
    except (msgspec.MsgspecError, UnicodeError, OverflowError, TypeError) as error:
        raise RequestError(f"the request cannot be sent: {error}") from None
    if len(frame) > MAX_CLIENT_MESSAGE_BYTES:
        raise RequestError(f"the request takes {len(frame)} bytes, at most {MAX_CLIENT_MESSAGE_BYTES} can be sent")
    return frame


def wait_for_end(thread: threading.Thread | None) -> None:
    """Join a thread, unless it is the calling one, for at most CLOSE_TIMEOUT_S; log its name if it still runs then."""
    if thread is None or thread is threading.current_thread():
        return
    thread.join(CLOSE_TIMEOUT_S)
    if thread.is_alive():
        logger.warning(
            "closed, but a callback has not returned within %g s: thread «%s» continues until the program ends",
            CLOSE_TIMEOUT_S,
            thread.name,
        )


class CallbackThread:
    """Thread that runs user callbacks in order. The socket's thread cannot run them: a callback may be slow or wait for
    this client, while pings must continue. The thread starts with this object, so that no callback waits for its start.

    `run` may be called from any thread; after `stop` it runs the callback in the calling thread.
    """

    def __init__(self, name: str) -> None:
        self._callbacks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_stopped = False
        self.thread = start_thread(name, self._work)

    def run(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_stopped:
                self._callbacks.put(callback)
                return
        callback()

    def stop(self) -> None:
        """End the thread after the queued callbacks."""
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                self._callbacks.put(None)

    def _work(self) -> None:
        while True:
            callback = self._callbacks.get()
            if callback is None:
                return
            callback()
