"""ClientProtocol: what one client has open with a frontend and what it must say next. No socket, thread or clock.

    greeting ──Welcome──▶ ready ──Unknown, gap, silence, disconnect──▶ greeting
       └──deadline──▶ lost ──submit──▶ greeting            any ──refused, engine dead, close──▶ ended

Whoever owns it feeds it messages and the time, sends what it says, and opens a new connection when it asks for one.
Every way back to `ready` submits everything open again with the tokens it already has.
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
    Credit,
    Delta,
    Deltas,
    FrontendMessage,
    Query,
    QueryFailed,
    Reply,
)
from .keepalive import Keepalive
from .open_request import OpenRequest
from .submit_window import SubmitWindow

QueryResult: TypeAlias = Reply | TokenloomError  # to a query; QueryFailed comes as its error
QuerySink: TypeAlias = Callable[[QueryResult], None]
ReplyType = TypeVar("ReplyType", bound=Message)

MAX_OPEN_REQUESTS = 1 << 17  # in one conversation; a submit beyond gets Overloaded
CREDIT_BATCH = CREDIT_WINDOW // 4  # taken Deltas messages that one Credit reports
MAX_GAPS = 8  # attempts of a request that may meet tokens which do not follow, before it fails

State = Literal["greeting", "ready", "lost", "ended"]
_MOVES: dict[State, set[State]] = {
    "greeting": {"greeting", "ready", "lost", "ended"},
    "ready": {"greeting", "ended"},
    "lost": {"greeting", "ended"},
    "ended": set(),
}


class ClientProtocol:
    """Invariant: what is open is in `_requests` or `_queries`, and gets exactly one last update."""

    def __init__(
        self, address: str, send: Callable[[ClientMessage], None], connect_timeout_s: float, reconnect_timeout_s: float
    ) -> None:
        self._address = address
        self._send = send
        self._patience_s = connect_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._requests: dict[str, OpenRequest] = {}
        self._queries: dict[int, tuple[Query, QuerySink]] = {}
        self._window = SubmitWindow()
        self._keepalive = Keepalive()
        self._unsent_aborts: list[str] = []  # of requests that a frontend may still run when it is back
        self._num_taken = 0  # Deltas messages since the last Credit
        self._run_id: str | None = None
        self._greet_deadline = 0.0
        self.state: State = "lost"
        self.error: TokenloomError | None = None  # why it ended, or why the last greeting failed
        self.needs_reconnect = False  # the owner must open a fresh connection and call `greet`

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for something."""
        return bool(self._requests or self._queries)

    # ── what the caller wants ──

    def submit(self, request: OpenRequest) -> None:
        if self.error is not None and self.state == "ended":
            request.sink(self.error)
        elif request.request_id in self._requests:
            request.sink(RequestError(f"request_id {request.request_id} is open already: choose another"))
        elif len(self._requests) >= MAX_OPEN_REQUESTS:
            request.sink(Overloaded(f"{len(self._requests)} requests are open on this client: wait for some to finish"))
        else:
            self._requests[request.request_id] = request
            self._window.add(request)
            self._wake_up()

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
            self._ask(query)
        self._wake_up()

    def end(self, error: TokenloomError) -> None:
        """Nothing more will be said: everything open, now and later, gets `error`."""
        if self.state != "ended":
            self._move("ended")
            self.error = error
            self._fail_all(error)

    # ── what the frontend says ──

    def greet(self, now: float) -> None:
        """A fresh connection is open: say Hello on it."""
        if self.state != "greeting":
            self._greet_deadline = now + self._patience_s
        self._move("greeting")
        self.needs_reconnect = False
        self._keepalive.rest()
        self._send(Hello(protocol_version=PROTOCOL_VERSION))

    def receive(self, message: FrontendMessage, now: float) -> None:
        if self.state == "ended" or self.needs_reconnect:
            return
        self._keepalive.heard()
        match message:
            case Deltas():
                self._take_all(message)
            case Accepted():
                self._accept(message)
            case Welcome():
                self._welcome(message)
            case Unknown():
                if self.state == "ready":  # while greeting it answers what was sent before the Hello
                    self.greet(now)
            case Refused():
                self.end(self._refusal(message.error))
            case Pong():
                pass
            case QueryFailed():
                self._answer(message.query_id, message.error.to_exception())
            case _:
                self._answer(message.query_id, message)
        self._submit_waiting()

    def tick(self, now: float) -> float | None:
        """Do what is due and return when to call again, None for not before something happens."""
        if self.state == "greeting":
            if now < self._greet_deadline:
                return self._greet_deadline
            self._lose()
        if self.state != "ready" or not self.is_busy:
            self._keepalive.rest()
            return None
        due = self._keepalive.due(now)
        if due == "ping":
            self._send(Ping())
        elif due == "lost":
            self.needs_reconnect = True
        return self._keepalive.next_due

    # ── how it goes on ──

    def _move(self, state: State) -> None:
        if state not in _MOVES[self.state]:
            raise InternalError(f"a conversation cannot go from {self.state} to {state}")
        self.state = state

    def _wake_up(self) -> None:
        if self.state == "lost":
            self.needs_reconnect = True
        self._submit_waiting()

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
        self._patience_s = self._reconnect_timeout_s
        self._num_taken = 0
        is_other_engine = self._run_id is not None and self._run_id != welcome.run_id
        self._run_id = welcome.run_id
        for request in list(self._requests.values()):
            if request.is_aborted:
                self._unsent_aborts.append(request.request_id)
                self._finish_aborted(request)
            elif is_other_engine and request.num_tokens:  # which may serve another model
                self._finish(request, self._replaced_error(request))
        self._window.restart(self._requests.values())
        for request_id in self._unsent_aborts:
            self._send(Abort(request_id=request_id))
        self._unsent_aborts.clear()
        for query, _ in list(self._queries.values()):
            self._ask(query)

    def _ask(self, query: Query) -> None:
        try:
            self._send(query)
        except RequestError as error:  # it does not fit into a message
            self._answer(query.query_id, error)

    def _submit_waiting(self) -> None:
        while self.state == "ready" and not self.needs_reconnect:
            request = self._window.pop()
            if request is None:
                return
            try:
                self._send(request.next_submit())
            except RequestError as error:  # it does not fit into a message
                self._finish(request, error)

    def _accept(self, accepted: Accepted) -> None:
        request = self._requests.get(accepted.request_id)
        if request is not None and request.accept(accepted):
            self._window.note_answered(request)
            request.sink(accepted)

    def _take_all(self, message: Deltas) -> None:
        for delta in message.deltas:
            request = self._requests.get(delta.request_id)
            if request is not None and not self.needs_reconnect:
                self._take(request, delta)
        self._num_taken += 1
        if self._num_taken >= CREDIT_BATCH and self.state == "ready":
            self._send(Credit(count=self._num_taken))
            self._num_taken = 0

    def _take(self, request: OpenRequest, delta: Delta) -> None:
        if delta.finish_reason == "error":
            error = delta.error or ErrorInfo("internal", "the request failed and the engine did not say why")
            if len(request.unfinished) > 1:  # the others may still run
                self._send_abort(request.request_id)
            self._finish(request, error.to_exception())
            return
        outcome = request.apply(delta)
        if outcome == "applied" and not request.unfinished:
            self._finish(request, delta)
        elif outcome == "applied":
            request.sink(delta)
        elif request.is_aborted:
            if delta.finish_reason is not None:
                self._finish_aborted(request)
        elif outcome == "gap" and request.num_gaps > MAX_GAPS:
            self._send_abort(request.request_id)
            self._finish(request, self._gap_error(request, delta))
        elif outcome == "gap":  # messages were lost, so that everything is asked for again
            self.needs_reconnect = True

    def _send_abort(self, request_id: str) -> None:
        if self.state == "ready":
            self._send(Abort(request_id=request_id))
        else:
            self._unsent_aborts.append(request_id)

    def _answer(self, query_id: int, reply: QueryResult) -> None:
        if query_id in self._queries:
            _, sink = self._queries.pop(query_id)
            sink(reply)

    # ── how it ends ──

    def _finish(self, request: OpenRequest, last: Delta | TokenloomError) -> None:
        del self._requests[request.request_id]
        self._window.remove(request)
        request.sink(last)

    def _finish_aborted(self, request: OpenRequest) -> None:
        """The frontend does not hold this aborted request (any more), so that its end is made here."""
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
            with contextlib.suppress(Exception):  # a sink that fails must not keep the others waiting
                self._finish(request, error)
        self._answer_all(error)

    def fail_queries(self, cause: ProtocolError) -> None:
        """A message that cannot be read may have been the reply that a query waits for."""
        self._answer_all(ProtocolError(f"the engine sent what this client cannot read ({cause}): match their versions"))

    def _answer_all(self, error: TokenloomError) -> None:
        for query_id in list(self._queries):
            with contextlib.suppress(Exception):
                self._answer(query_id, error)

    def _lose(self) -> None:
        """Nobody answered the greeting in time. A later submit tries again."""
        what = f"no engine answers at {self._address} for {self._patience_s:g} s"
        if self._run_id is not None:
            what = f"the engine at {self._address} is lost and did not come back within {self._patience_s:g} s"
        mend = f"start one with `engine-launch --listen {self._address}`, or check the address"
        if self._address.startswith("tcp://"):
            mend = "check the address, and the key file: an engine does not answer who has not its key"
        self._move("lost")
        self._unsent_aborts.clear()
        self.error = EngineDead(f"{what}: {mend}")
        self._fail_all(self.error)

    def _refusal(self, info: ErrorInfo) -> TokenloomError:
        if info.kind != "protocol":
            return info.to_exception()
        return ProtocolError(f"{info.message} (engine at {self._address})")  # it holds both versions

    def _replaced_error(self, request: OpenRequest) -> EngineDead:
        return EngineDead(
            f"another engine took the place of the one at {self._address} after {request.num_tokens} tokens of "
            f"request {request.request_id}: submit it again"
        )

    def _gap_error(self, request: OpenRequest, delta: Delta) -> ProtocolError:
        return ProtocolError(
            f"the engine at {self._address} sent tokens from {delta.start} of request {request.request_id}, which "
            f"has {request.num_tokens}, after {MAX_GAPS} new attempts: report this as a bug"
        )


def check_reply(reply: QueryResult, reply_type: type[ReplyType]) -> ReplyType:
    """The reply as the type that was asked for; raises it if it is an error."""
    if isinstance(reply, TokenloomError):
        raise reply
    if not isinstance(reply, reply_type):
        raise ProtocolError(f"the engine answered a query with {type(reply).__name__}, not {reply_type.__name__}")
    return reply


def _ignore(update: object) -> None:
    pass
