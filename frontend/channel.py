"""Channel: how a client speaks to an engine, whether over a socket or inside one process.

Client and AsyncClient are written against this protocol alone. A request is registered with a sink, which gets the
request's updates in order and each token exactly once; the last update is a Delta with a finish reason or an error.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeAlias, TypeVar

from ..ipc.errors import TokenloomError
from ..ipc.messages import (
    Accepted,
    Control,
    Delta,
    Detokenize,
    Done,
    GetHealth,
    GetInfo,
    Health,
    Info,
    Submit,
    Text,
    TokenIds,
    Tokenize,
)

T = TypeVar("T")

Update: TypeAlias = Accepted | Delta | TokenloomError  # immutable; an error is always the last
Sink: TypeAlias = Callable[[Update], None]  # called in the channel's thread: must be cheap and never block

Query: TypeAlias = Tokenize | Detokenize | GetHealth | GetInfo | Control
Reply: TypeAlias = TokenIds | Text | Health | Info | Done | TokenloomError
ReplySink: TypeAlias = Callable[[Reply], None]

MAX_OPEN_REQUESTS = 1 << 17  # on one channel; a submit beyond raises Overloaded


class Channel(Protocol):
    """Every method may be called from any thread, except that `wait` must not be called from a sink."""

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Open a request. RequestError if its id is open already, Overloaded beyond MAX_OPEN_REQUESTS."""

    def abort(self, request_id: str) -> None:
        """End a request; its sink gets a last delta with finish_reason abort. An unknown id is ignored."""

    def cancel(self, request_id: str) -> None:
        """End a request whose caller is gone: like abort, but its sink hears nothing more."""

    def query(self, make_query: Callable[[int], Query], sink: ReplySink) -> None:
        """Ask; `make_query` gets the query's id."""

    def wait(self, queue: SimpleQueue[T], timeout_s: float | None = None) -> T:
        """The next item that a sink puts into `queue`; raises queue.Empty after `timeout_s`."""

    def call_later(self, function: Callable[[], None]) -> None:
        """Run `function`, which may take long, outside the channel's own thread."""

    def close(self) -> None:
        """End every request with an error and release everything. A second call does nothing."""
