"""Transport: how a client speaks to an engine, whether over a socket or inside one process.

Client and AsyncClient are written against this alone. A request is registered with a sink, which gets the request's
updates in order and each token exactly once; the last update is a Delta with a finish reason or an error.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from ...ipc.codec import encode
from ...ipc.errors import RequestError
from ...ipc.messages.client import ClientMessage, Query, Submit
from ...ipc.sockets import MAX_CLIENT_MESSAGE_BYTES
from .open_request import OpenRequest, Sink
from .protocol import ClientProtocol, QuerySink

T = TypeVar("T")

logger = logging.getLogger("tokenloom.client")

CLOSE_TIMEOUT_S = 5.0  # for callbacks of the caller's that still run; a thread of ours ends at once


class Transport(ABC):
    """Every method may be called from any thread, except that `wait` must not be called from a sink.

    Invariant: the conversation is touched by one thread at a time. Callers only leave commands for it.
    """

    def __init__(self, protocol: ClientProtocol) -> None:
        self._protocol = protocol
        self._commands: deque[Callable[[], None]] = deque()
        self._query_ids = itertools.count(1)

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Open a request. Its sink gets RequestError if its id is open already, Overloaded beyond
        MAX_OPEN_REQUESTS."""
        self._command(partial(self._protocol.submit, OpenRequest(submit, sink)))

    def abort(self, request_id: str) -> None:
        """End a request; its sink gets a last delta with finish_reason abort. An unknown id is ignored."""
        self._command(partial(self._protocol.abort, request_id))

    def cancel(self, request_id: str) -> None:
        """End a request whose caller is gone: like abort, but its sink hears nothing more."""
        with contextlib.suppress(RequestError):  # closed: cancelled already
            self._command(partial(self._protocol.cancel, request_id))

    def query(self, make_query: Callable[..., Query], sink: QuerySink) -> None:
        """Ask; `make_query` gets the query's id by its name, query_id."""
        self._command(partial(self._protocol.query, make_query(query_id=next(self._query_ids)), sink))

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    @abstractmethod
    def _command(self, command: Callable[[], None]) -> None:
        """Leave a command and see that it is run soon; RequestError once the channel is closed."""

    @abstractmethod
    def wait(self, queue: SimpleQueue[T], timeout_s: float | None = None) -> T:
        """The next item that a sink puts into `queue`; raises queue.Empty after `timeout_s`."""

    @abstractmethod
    def call_later(self, function: Callable[[], None]) -> None:
        """Run `function`, which may take long, outside the channel's own thread."""

    @abstractmethod
    def close(self) -> None:
        """End every request with an error and release everything. A second call does nothing.

        A callback that does not return is waited for CLOSE_TIMEOUT_S: then its thread, a daemon, is named in a warning
        and left alone, so that neither this call nor the end of the program hangs.
        """


def encode_client_message(message: ClientMessage) -> bytes:
    """A client's message as bytes; RequestError if it holds what no frame can."""
    try:
        frame = encode(message)
    except (msgspec.MsgspecError, UnicodeError, OverflowError, TypeError) as error:
        raise RequestError(f"the request cannot be sent: {error}") from None
    if len(frame) > MAX_CLIENT_MESSAGE_BYTES:
        raise RequestError(f"the request takes {len(frame)} bytes, at most {MAX_CLIENT_MESSAGE_BYTES} can be sent")
    return frame


def wait_for_end(thread: threading.Thread | None) -> None:
    """See `Transport.close`. The caller's own thread is not waited for."""
    if thread is None or thread is threading.current_thread():
        return
    thread.join(CLOSE_TIMEOUT_S)
    if thread.is_alive():
        logger.warning(
            "closed, but a callback has not returned for %g s: the thread «%s» is left to itself and ends with the "
            "program",
            CLOSE_TIMEOUT_S,
            thread.name,
        )


class CallbackThread:
    """Runs callers' own functions, one after the other, outside the thread of the socket: one may be slow, or may wait
    for the very client that calls it, and pings must go on meanwhile. The thread starts with the first callback.

    `run` from any thread; after `stop` the errands that are queued are still run, new ones at once by the caller."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._callbacks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None  # once there was a callback
        self._is_stopped = False

    def run(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_stopped:
                self._callbacks.put(callback)
                if self.thread is None:
                    self.thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self.thread.start()
                return
        callback()

    def stop(self) -> None:
        """The thread ends when what is queued is done."""
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
