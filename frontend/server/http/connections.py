"""Connections: limits on HTTP clients: the time for sending a request, the size of its head, the number of connections.

If a client sends a head or body too slowly, it gets 408 and its connection is closed. One timer checks all connections
whose client has to act, a few times within the limit; without such connections no timer runs. Answers have no limit of
time.

A head may have MAX_HEAD_BYTES and MAX_HEADERS, including trailers; above that the client gets 431. Bytes are counted as
they arrive, before a key is checked. A refused client may continue to send for a while, since it may read its answer
only after that.

If the limit of connections is reached, a new one replaces, of the connections without a complete head or an open
answer, the one whose stage changed first. If there is none, requests on the new connection get 503, except probes.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ....ipc.process.descriptors import descriptor_limit
from ....ipc.process.log import is_worth_a_line
from ...forms.openai.errors import HttpError, encode_json
from ...listening.journal.record import State
from .kept.connection import Kept, NotKept
from .middleware import LOCAL, OVER_LIMIT

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope

logger = logging.getLogger("tokenloom.http")

CHECKS_PER_LIMIT = 4  # runs of the timer within the time limit
MIN_BYTES_PER_S = 1024  # least average rate at which a body must arrive
MAX_HEAD_BYTES = 64 << 10  # size of a request's URL and headers, and of the trailers after its body
MAX_HEADERS = 256  # number of a request's headers, including trailers
MAX_PIPELINED = 128  # requests of a connection that wait for earlier answers
NUM_KEPT_FDS = 128  # descriptors for the engine's own sockets and files and for ZeroMQ clients


def connection_limit() -> int:
    """Return the number of HTTP connections that the limit of open files allows."""
    limit = descriptor_limit()
    return max(limit - NUM_KEPT_FDS, limit // 2)


class Stage(enum.Enum):
    """Progress of the newest request on a connection."""

    NEW = enum.auto()  # connected, nothing received
    HEAD = enum.auto()  # part of the head received
    BODY = enum.auto()  # head received, body not complete
    ANSWER = enum.auto()  # request received, not answered
    IDLE = enum.auto()  # answered completely
    REFUSED = enum.auto()  # answered with an error; further bytes are dropped


_AWAITED = frozenset((Stage.NEW, Stage.HEAD, Stage.BODY, Stage.REFUSED))  # the client must act
_WITHOUT_REQUEST = frozenset((Stage.NEW, Stage.HEAD, Stage.IDLE, Stage.REFUSED))


class Connections:
    """All open connections and the timer. It keeps the set of those whose client has to act, and those without a
    complete head or an open answer, in the order in which their stage changed last."""

    def __init__(
        self, timeout_s: float, max_connections: int, on_refused: Callable[[HttpConnection, HttpError, str], None]
    ) -> None:
        """`on_refused` is called with connection, error and reason (a metric label) for each error that is sent without
        the app."""
        self.timeout_s, self.max_connections, self.on_refused = timeout_s, max_connections, on_refused
        self._open: set[HttpConnection] = set()
        self.loop = asyncio.get_running_loop()
        self._awaited: set[HttpConnection] = set()
        self._without_request: dict[HttpConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._checked_at = 0.0
        self._num_over_limit = 0

    @property
    def has_timer(self) -> bool:
        return self._timer is not None

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self, connection: HttpConnection) -> bool:
        """Add a connection. If there are too many, close those that have been without a request longest; return False
        if there are still too many."""
        self._open.add(connection)
        while self.num_open > self.max_connections and self._without_request:
            longest = next(iter(self._without_request))
            self.close(longest)
            longest.transport.close()
        if self.num_open <= self.max_connections:
            return True
        self._num_over_limit += 1
        if is_worth_a_line(self._num_over_limit):
            logger.warning(
                "%d HTTP connections have requests and at most %d may be open: new ones are refused, %d so far; raise "
                "the limit of open files (ulimit -n)",
                self.num_open - 1,
                self.max_connections,
                self._num_over_limit,
            )
        return False

    def on_stage(self, connection: HttpConnection, stage: Stage) -> None:
        self._without_request.pop(connection, None)
        if stage in _WITHOUT_REQUEST:
            self._without_request[connection] = None
        if stage not in _AWAITED:
            self._awaited.discard(connection)
            return
        self._awaited.add(connection)
        if self._timer is None:
            self._checked_at = self.loop.time()
            self._set_timer()

    def close(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        self._without_request.pop(connection, None)
        self._awaited.discard(connection)

    def _set_timer(self) -> None:
        self._timer = self.loop.call_later(self.timeout_s / CHECKS_PER_LIMIT, self._check_all)

    def _check_all(self) -> None:
        now, self._timer = self.loop.time(), None
        late_s = max(now - self._checked_at - self.timeout_s / CHECKS_PER_LIMIT, 0.0)
        self._checked_at = now
        for each in list(self._awaited):
            each.check(now, late_s)
        if self._awaited:
            self._set_timer()


class WithoutChunks:
    """App of one request, for clients older than HTTP/1.1, which do not know chunked encoding: a body of unknown length
    ends with the connection, which uvicorn closes after the answer."""

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app, self._cycle = app, cycle

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        cycle, has_length = self._cycle, True

        async def send_whole(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_whole)


class HttpConnection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on the client's time and sizes."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        connections: Connections,
        is_local: bool,
        kept: Kept | None = None,
    ) -> None:
        """`is_local`: whether only processes of this machine can connect. `kept`: its journal."""
        super().__init__(config, server_state, {}, connections.loop)
        self._connections = connections
        self._stage = Stage.NEW
        self._marks = {LOCAL: True} if is_local else {}  # added to the ASGI scope of each request
        self._answered: RequestResponseCycle | None = None  # oldest request without a whole answer; `cycle`: newest
        self._num_body_bytes = 0
        self._num_head_bytes = self._num_headers = 0  # of the head, as passed on by the parser
        self._num_unread_bytes = 0  # given to the parser since it last passed on a head or a part of a body
        self._body_parts: list[bytes] = []  # found in the data that is being parsed
        self._kept = kept or NotKept()
        self._since = self._last_at = 0.0  # loop times: start of the stage, last data

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        self._since = self._last_at = self.loop.time()
        self._connections.on_stage(self, stage)

    # ── events of the socket ──

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(self._kept.wrap(transport))
        if not self._connections.open(self):
            self._marks[OVER_LIMIT] = True
        self._enter(Stage.IDLE if self._kept.is_between_requests else Stage.NEW)
        if self._stage is Stage.IDLE:  # uvicorn sets this timer only behind an answer of its own
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        if request := self._kept.replayed():  # here, before more is read
            self._parse(request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.close(self)
        self._end_answers()  # uvicorn itself ends only the answer of `cycle`
        super().connection_lost(exc)
        self._kept.close()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            self._kept.put_in(len(data), is_early=self._stage is Stage.ANSWER)
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        if self._stage in (Stage.NEW, Stage.IDLE):
            self._enter(Stage.HEAD)
        else:
            self._last_at = self.loop.time()
        self._num_unread_bytes += len(data)
        super().data_received(data)
        self._pass_body_on()
        if self._num_unread_bytes > MAX_HEAD_BYTES and not (self._is_refused or self.transport.is_closing()):
            self._refuse_head()

    # ── events of the parser and of the answer ──

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._stage is not Stage.HEAD or self._is_answering_earlier:
            self._kept.on_pipelined()
        self._num_head_bytes = self._num_headers = self._num_unread_bytes = 0
        self.scope.update(self._marks)  # type: ignore[typeddict-item]
        if self._stage is not Stage.HEAD:  # the next request of a pipeline
            self._enter(Stage.HEAD)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_head(len(name) + len(value))
        if self._stage is Stage.HEAD:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("the connection has too many requests")  # which makes the parser stop
        is_old = self.parser.get_http_version() < "1.1"
        self.expect_100_continue &= not (is_old or self._kept.has_answer)  # RFC 9110, 10.1.1
        super().on_headers_complete()  # raises for a bad URL
        if not self.pipeline:
            self._answered = self.cycle
        self._num_body_bytes = self._num_unread_bytes = 0
        self._enter(Stage.BODY)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] < "1.1":
            app = WithoutChunks(app, cycle)
        app = self._kept.answer(app, cycle, partial(self._state_after, cycle))  # type: ignore[assignment, arg-type]
        super()._start_asgi_task(cycle, app)

    def _state_after(self, cycle: RequestResponseCycle) -> State:
        """Return the state after the answer that is about to end. A connection with bytes of the next request is
        lost, and one with the rest of this request still to come can only be closed."""
        if not cycle.keep_alive:
            return State.CLOSING
        if self.pipeline or self._stage is Stage.HEAD:
            return State.LOST
        return State.CLOSING if self._stage is Stage.BODY else State.IDLE

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_unread_bytes = 0
        self._body_parts.append(body)

    def _pass_body_on(self) -> None:
        """Pass on the received parts of a body as one. For each part that it gets, uvicorn copies all bytes that wait,
        and chunks may be as small as one byte."""
        if self._body_parts:
            super().on_body(b"".join(self._body_parts))
            self._body_parts.clear()

    def on_message_complete(self) -> None:
        self._pass_body_on()
        super().on_message_complete()
        self._num_unread_bytes = 0
        # If the answer came before the end of the body, the rest has stopped uvicorn's keep-alive timer: use ours.
        self._enter(Stage.NEW if self.cycle.response_complete else Stage.ANSWER)
        self._kept.on_request_end()

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        if self._answered is not None:
            self._kept.on_answered(self._state_after(self._answered))
        super().on_response_complete()
        self._answered = following
        if self._stage is Stage.ANSWER and self.cycle.response_complete and not self.transport.is_closing():
            self._enter(Stage.IDLE)

    # ── limits ──

    def check(self, now: float, late_s: float) -> None:
        """Close the connection if its client is too slow, with a 408 if a request has begun. Not counted are `late_s`,
        the seconds by which the event loop was late, and the time during which an earlier answer is open or reading is
        paused."""
        if self._is_answering_earlier or self.flow.read_paused:
            self._since = self._last_at = now
            return
        self._since += late_s
        self._last_at += late_s
        limit_s, taken_s = self._connections.timeout_s, now - self._since
        if self._stage is Stage.BODY:
            if now - self._last_at > limit_s or taken_s > limit_s + self._num_body_bytes / MIN_BYTES_PER_S:
                self._refuse(
                    408, f"{self._num_body_bytes} bytes of the body came within {taken_s:.0f} s: send it again", "slow"
                )
        elif taken_s > limit_s:
            if self._stage is Stage.HEAD:
                text = f"the head of the request did not come whole within {limit_s:g} s: send it again"
                self._refuse(408, text, "slow")
            else:
                self.transport.close()

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._is_head_too_large:
            raise ValueError("the head is too large")  # which makes the parser stop

    @property
    def _is_refused(self) -> bool:
        return self._stage is Stage.REFUSED

    @property
    def _is_head_too_large(self) -> bool:
        return self._num_head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS

    @property
    def _is_answering_earlier(self) -> bool:
        """Whether the answer to an earlier request than the newest is still open."""
        if self._stage is Stage.HEAD:  # `cycle` still belongs to the previous request
            return self.cycle is not None and not self.cycle.response_complete
        return len(self.pipeline) > 0

    @property
    def _may_send_error(self) -> bool:
        """Whether no answer is partly sent and no complete request waits for its answer."""
        has_begun = self._stage is Stage.BODY and self.cycle.response_started
        return self._stage is not Stage.ANSWER and not has_begun and not self._is_answering_earlier

    def send_400_response(self, msg: str) -> None:
        """Refuse the request at which the parser has stopped."""
        if self._is_head_too_large:
            self._refuse_head()
        else:
            self._refuse(400, "this is not an HTTP/1.1 request: send it again", "http")

    def _refuse_head(self) -> None:
        text = f"URL and headers of a request may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers: send less"
        self._refuse(431, text, "head")

    def refuse_lost(self, *, is_final: bool) -> None:
        """Refuse the request that a lost frontend has left. `is_final`: it must not be sent again."""
        if is_final:
            self._refuse(500, "the server was lost several times with this request", "lost")
        else:
            self._refuse(503, "a part of the request was lost with a process: send it again", "lost")

    def _refuse(self, status: int, message: str, why: str) -> None:
        """Send an error without the app, and close the connection.

        If the client could take the error for the answer to another request, close at once without sending it. If the
        client is slow (408), close right after sending it. Otherwise close once the client has closed: closing a socket
        with unread bytes resets the connection, and the client may lose the error."""
        may_send = self._may_send_error
        if may_send:
            error = HttpError(status, message, "server_error" if status >= 500 else "invalid_request_error")
            self._connections.on_refused(self, error, why)
            body = encode_json(error.body)
            length = b"content-length: %d\r\n" % len(body)
            again = b"retry-after: 0\r\n" if status == 503 else b""
            form = b"content-type: application/json\r\nconnection: close\r\n"
            self._kept.expect_last()
            self.transport.write(STATUS_LINE[status] + form + again + length + b"\r\n" + body)
        self._end_answers()  # so that the app sends nothing after the error or to a closed connection
        if not may_send or status == 408:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._enter(Stage.REFUSED)

    def _end_answers(self) -> None:
        """End the open answers: the app sends nothing more, and receives a disconnect event."""
        for cycle in (self._answered, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected, cycle.waiting_for_100_continue = True, False
                cycle.message_event.set()
