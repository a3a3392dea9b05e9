"""ClientProtocol: the state machine of one client's connection to a frontend. It has no socket, thread or clock.

    greeting ──Welcome──▶ ready ──Unknown, gap, silence, disconnect──▶ greeting
       └──deadline──▶ lost ──submit──▶ greeting            any ──refused, engine dead, close──▶ ended

The owner passes messages and the time to it, sends its messages, and opens a new connection when `needs_reconnect` is
set. Each return to `ready` resubmits every open request with the tokens delivered so far. If another engine answers
that may serve another model, requests with tokens fail instead.

The route of a request from any caller to the engine, and of its updates back:

    caller's thread      Client.generate ─▶ RequestBatch ─▶ Transport.submit: OpenRequest(submit, sink) ─▶ _commands
    transport's thread   _turn ─▶ ClientProtocol.submit ─▶ SubmitWindow ─▶ OpenRequest.next_submit ─▶ socket or engine
                         sink ◀─ OpenRequest.apply ◀─ ClientProtocol.receive ◀─ Deltas ◀─ socket or engine
    caller's thread      OutputBuilder ◀─ queue of RequestBatch, RequestFuture, AsyncStream or Client.stream ◀─ sink
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

from ...ipc.errors import EngineDead, ErrorInfo, InternalError, Overloaded, ProtocolError, RequestError, TokenloomError
from ...ipc.messages.base import PROTOCOL_VERSION, Hello, Message, Ping, Pong, Refused, Unknown, Welcome
from ...ipc.messages.client import (
    CREDIT_WINDOW,
    Abort,
    Accepted,
    ClientMessage,
    Control,
    Credit,
    Delta,
    Deltas,
    FrontendMessage,
    NeedMedia,
    Query,
    QueryFailed,
    Reply,
)
from ...ipc.sockets.addresses import admits_nobody
from ..forms.media.media_sender import MediaSender
from ..forms.prompts import id_is_open
from .keepalive import Keepalive
from .open_request import OpenRequest
from .submit_window import SubmitWindow

QueryResult: TypeAlias = Reply | TokenloomError  # reply to a query; QueryFailed is converted to its error
QuerySink: TypeAlias = Callable[[QueryResult], None]
ReplyType = TypeVar("ReplyType", bound=Message)

MAX_OPEN_REQUESTS = 1 << 17  # limit for one client; further submits get Overloaded
CREDIT_BATCH = CREDIT_WINDOW // 4  # Deltas messages acknowledged by one Credit
MAX_GAPS = 8  # consecutive attempts of a request that may end in a gap before the request fails

State = Literal["greeting", "ready", "lost", "ended"]
_MOVES: dict[State, set[State]] = {
    "greeting": {"greeting", "ready", "lost", "ended"},
    "ready": {"greeting", "ended"},
    "lost": {"greeting", "ended"},
    "ended": set(),
}


class ClientProtocol:
    """The open requests and queries of one client. Invariant: each of them gets exactly one last update. Times are in
    monotonic seconds."""

    def __init__(
        self,
        address: str,
        send: Callable[[ClientMessage], None],
        connect_timeout_s: float,
        reconnect_timeout_s: float,
        max_open_requests: int = MAX_OPEN_REQUESTS,
    ) -> None:
        self._address = address
        self._send = send
        self._greet_timeout_s = connect_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._max_open_requests = max_open_requests
        self._requests: dict[str, OpenRequest] = {}
        self._queries: dict[int, tuple[Query, QuerySink]] = {}
        self._window = SubmitWindow()
        self._keepalive = Keepalive()
        self._media = MediaSender(send)
        self._unsent_aborts: list[str] = []  # ids of requests that the engine may still run after a reconnect
        self._num_uncredited = 0  # Deltas messages since the last Credit
        self._run_id: str | None = None
        self._model_digest = ""
        self._greet_deadline = 0.0
        self.state: State = "lost"
        self.error: TokenloomError | None = None  # reason for the end, or for the last failed greeting
        self.needs_reconnect = False  # the owner must open a fresh connection and call `greet`

    @property
    def is_busy(self) -> bool:
        """Whether a request or query is open."""
        return bool(self._requests or self._queries)

    # ── calls of the client ──

    def submit(self, request: OpenRequest) -> None:
        if self.error is not None and self.state == "ended":
            request.sink(self.error)
        elif request.request_id in self._requests:
            request.sink(id_is_open(request.request_id))
        elif len(self._requests) >= self._max_open_requests:
            request.sink(Overloaded(f"{len(self._requests)} requests are open on this client: wait for some to finish"))
        else:
            self._requests[request.request_id] = request
            self._window.add(request)
            self._submit_waiting()

    def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.is_aborted:
            return
        request.is_aborted = True
        if request.was_sent:
            self._send_abort(request_id)
        if request in self._window.waiting or self.state != "ready":
            self._finish_aborted(request)

    def cancel(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.sink = _ignore
            self.abort(request_id)

    def query(self, query: Query, sink: QuerySink) -> None:
        if self.error is not None and self.state == "ended":
            sink(self.error)
            return
        self._queries[query.query_id] = (query, sink)
        if self.state == "ready":
            self._send_query(query)
        elif self.state == "lost":
            self.needs_reconnect = True

    def end(self, error: TokenloomError) -> None:
        """End the connection for good: all open and later requests and queries get `error`."""
        if self.state != "ended":
            self._move("ended")
            self.error = error
            self._fail_all(error)

    # ── events of the connection ──

    def greet(self, now: float) -> None:
        """Send Hello, on a new connection or after Unknown. The timeout for the Welcome starts with the first Hello."""
        if self.state != "greeting":
            self._greet_deadline = now + self._greet_timeout_s
        self._move("greeting")
        self.needs_reconnect = False
        self._keepalive.stop()
        self._send(Hello(protocol_version=PROTOCOL_VERSION))

    def receive(self, message: FrontendMessage, now: float) -> None:
        if self.state == "ended" or self.needs_reconnect:
            return
        self._keepalive.reset_silence()
        match message:
            case Deltas():
                self._apply_all(message)
            case Accepted():
                self._accept(message)
            case Welcome():
                self._welcome(message)
            case Unknown():
                if self.state == "ready":  # while greeting it replies to a message sent before the Hello
                    self.greet(now)
            case Refused():
                self.end(self._refusal(message.error))
            case NeedMedia():
                if (request := self._requests.get(message.request_id)) is not None and self.state == "ready":
                    self._media.send_again(request.media, message.digests)
            case Pong():
                pass
            case QueryFailed():
                self._end_query(message.query_id, message.error.to_exception())
            case _:
                self._end_query(message.query_id, message)
        if self._window.waiting:
            self._submit_waiting()

    def tick(self, now: float) -> float | None:
        """Handle timeouts and pings. Return the time of the next call; None if no call is needed before the next
        event."""
        if self.state == "greeting":
            if now < self._greet_deadline:
                return self._greet_deadline
            self._lose()
        if self.state != "ready" or not self.is_busy:
            self._keepalive.stop()
            return None
        due = self._keepalive.poll(now)
        if due == "ping":
            self._send(Ping())
        elif due == "lost":
            self.needs_reconnect = True
        return self._keepalive.next_due

    # ── progress ──

    def _move(self, state: State) -> None:
        if state not in _MOVES[self.state]:
            raise InternalError(f"a client's connection cannot go from {self.state} to {state}")
        self.state = state

    def _welcome(self, welcome: Welcome) -> None:
        if self.state != "greeting":
            return
        if welcome.protocol_version != PROTOCOL_VERSION:
            message = (
                f"the engine speaks protocol version {welcome.protocol_version}, this client speaks "
                f"{PROTOCOL_VERSION}: use the client of the engine's release"
            )
            self.end(self._refusal(ErrorInfo("protocol", message)))
            return
        self._move("ready")
        self.error = None
        self._greet_timeout_s = self._reconnect_timeout_s
        self._num_uncredited = 0
        is_same_model = bool(welcome.model_digest) and welcome.model_digest == self._model_digest
        is_other_engine = self._run_id is not None and self._run_id != welcome.run_id and not is_same_model
        self._run_id, self._model_digest = welcome.run_id, welcome.model_digest
        for request in list(self._requests.values()):
            if request.is_aborted:
                self._unsent_aborts.append(request.request_id)
                self._finish_aborted(request)
            elif is_other_engine and request.num_tokens:  # another engine may serve another model
                self._finish(request, self._replaced_error(request))
            elif is_other_engine:
                request.forget_adapter()
        self._window.restart(self._requests.values())
        for request_id in self._unsent_aborts:
            self._send(Abort(request_id=request_id))
        self._unsent_aborts.clear()
        for query, _ in list(self._queries.values()):
            self._send_query(query)

    def _send_query(self, query: Query) -> None:
        try:
            if isinstance(query, Control):
                self._media.send(query.media)
            self._send(query)
        except RequestError as error:  # the message is too large
            self._end_query(query.query_id, error)

    def _submit_waiting(self) -> None:
        if self.state == "lost":
            self.needs_reconnect = True
        while self.state == "ready" and not self.needs_reconnect:
            request = self._window.pop()
            if request is None:
                return
            try:
                if not request.was_sent:
                    self._media.send(request.media)
                self._send(request.next_submit())
            except RequestError as error:  # the message is too large
                self._finish(request, error)

    def _accept(self, accepted: Accepted) -> None:
        request = self._requests.get(accepted.request_id)
        if request is not None and request.accept(accepted):
            self._window.note_answered(request)
            request.sink(accepted)

    def _apply_all(self, message: Deltas) -> None:
        for delta in message.deltas:
            request = self._requests.get(delta.request_id)
            if request is not None and not self.needs_reconnect:
                self._apply(request, delta)
        self._num_uncredited += 1
        if self._num_uncredited >= CREDIT_BATCH and self.state == "ready":
            self._send(Credit(count=self._num_uncredited))
            self._num_uncredited = 0

    def _apply(self, request: OpenRequest, delta: Delta) -> None:
        if delta.finish_reason == "error":
            error = delta.error or ErrorInfo("internal", "the request failed, the engine gave no reason")
            if len(request.unfinished) > 1:  # the other sequences may still run
                self._send_abort(request.request_id)
            self._finish(request, error.to_exception())
            return
        outcome = request.apply(delta)
        if outcome == "applied" and delta.finish_reason is not None and not request.unfinished:
            self._finish(request, delta)
        elif outcome == "applied":
            request.sink(delta)
        elif request.is_aborted:
            if delta.finish_reason is not None:
                self._finish_aborted(request)
        elif outcome == "gap" and request.num_gaps > MAX_GAPS:
            self._send_abort(request.request_id)
            self._finish(request, self._gap_error(request, delta))
        elif outcome == "gap":  # messages were lost: a reconnect resubmits all requests
            self.needs_reconnect = True

    def _send_abort(self, request_id: str) -> None:
        if self.state == "ready":
            self._send(Abort(request_id=request_id))
        else:
            self._unsent_aborts.append(request_id)

    def _end_query(self, query_id: int, result: QueryResult) -> None:
        if query_id in self._queries:
            _, sink = self._queries.pop(query_id)
            sink(result)

    # ── end of requests and queries ──

    def _finish(self, request: OpenRequest, last: Delta | TokenloomError) -> None:
        del self._requests[request.request_id]
        self._window.remove(request)
        request.sink(last)

    def _finish_aborted(self, request: OpenRequest) -> None:
        """Pass the last deltas of an aborted request to its sink, in place of those of the frontend."""
        *others, last = [
            Delta(
                request_id=request.request_id,
                index=index,
                start=request.sequences[index].num_tokens,
                finish_reason="abort",
            )
            for index in request.unfinished
        ]
        for delta in others:
            request.sink(delta)
        self._finish(request, last)

    def _fail_all(self, error: TokenloomError) -> None:
        for request in list(self._requests.values()):
            with contextlib.suppress(Exception):  # an error in one sink must not skip the others
                self._finish(request, error)
        self._fail_queries(error)

    def on_malformed(self, cause: ProtocolError) -> None:
        """Fail all queries: the message that cannot be decoded may be a reply. If it held deltas, a gap shows it
        later."""
        text = f"this client cannot decode a message of the engine ({cause}): use the same version of both"
        self._fail_queries(ProtocolError(text))

    def _fail_queries(self, error: TokenloomError) -> None:
        for query_id in list(self._queries):
            with contextlib.suppress(Exception):
                self._end_query(query_id, error)

    def _lose(self) -> None:
        """Fail all open requests and queries, after no Welcome has arrived in time. A later submit or query connects
        again."""
        text = f"no engine answers at {self._address} for {self._greet_timeout_s:g} s"
        if self._run_id is not None:
            text = f"the engine at {self._address} is lost and did not come back within {self._greet_timeout_s:g} s"
        mend = f"start one with `engine-launch --listen {self._address}`, or check the address"
        if self._address.startswith("tcp://"):
            mend = "check the address, and the key file: an engine does not answer a client without its key"
        elif admits_nobody(self._address):
            text = f"the engine at {self._address} takes no new connections: it has few descriptors left"
            mend = "close other clients, or raise its limit of open files (ulimit -n, LimitNOFILE)"
        self._move("lost")
        self._unsent_aborts.clear()
        self.error = EngineDead(f"{text}: {mend}")
        self._fail_all(self.error)

    def _refusal(self, info: ErrorInfo) -> TokenloomError:
        if info.kind != "protocol":
            return info.to_exception()
        return ProtocolError(f"{info.message} (engine at {self._address})")  # the message has both versions

    def _replaced_error(self, request: OpenRequest) -> EngineDead:
        return EngineDead(
            f"another engine has replaced the one at {self._address} after {request.num_tokens} tokens of "
            f"request {request.request_id}: submit it again"
        )

    def _gap_error(self, request: OpenRequest, delta: Delta) -> ProtocolError:
        return ProtocolError(
            f"the engine at {self._address} sent tokens from {delta.start} of request {request.request_id}, which "
            f"has {request.num_tokens}, after {MAX_GAPS} new attempts: report this as a bug"
        )


def check_reply(reply: QueryResult, reply_type: type[ReplyType]) -> ReplyType:
    """Return `reply` if it is a `reply_type`; raise it if it is an error, and ProtocolError if it is another
    message."""
    if isinstance(reply, TokenloomError):
        raise reply
    if not isinstance(reply, reply_type):
        raise ProtocolError(f"the engine replied with {type(reply).__name__}, expected {reply_type.__name__}")
    return reply


def _ignore(update: object) -> None:
    pass
