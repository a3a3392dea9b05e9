"""KeptConnection: an HTTP connection that a successor of this frontend can go on with.

Its bytes are in the journal (listening/journal/), and the supervisor has a duplicate of its socket. NotKept stands in
where there is no journal. KeptAnswer is the way of one answer's messages to uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .....ipc.process.faults import maybe_fail
from ....listening.journal.journal import HttpJournal
from ....listening.journal.record import Reason, State
from ....listening.journal.slot import Slot
from ....listening.keeper import Keeper
from ...api.continuation import SHOWN, TOKENS, Continuation, answers_of, new_continuation, working_on
from .reader import JournalReader
from .transport import KeptTransport


class Flow(Protocol):
    """The part of uvicorn's FlowControl that is used here."""

    write_paused: bool

    async def drain(self) -> None: ...


class Cycle(Protocol):
    """The part of uvicorn's RequestResponseCycle that is used here."""

    disconnected: bool
    chunked_encoding: bool | None  # None: not known yet
    flow: Flow

    async def send(self, message: Any) -> None: ...


class Kept(Protocol):
    """The journal of a connection, as HttpConnection uses it."""

    def wrap(self, transport: asyncio.Transport) -> asyncio.Transport:
        """Return the transport to write to. Begin with the bytes that a lost frontend has left."""

    def reader(self, protocol: asyncio.Protocol) -> asyncio.BaseProtocol:
        """Return the protocol for the event loop, which reads for `protocol`."""

    def put_in(self, num_bytes: int, *, is_early: bool) -> None:
        """Record bytes that were read. `is_early`: the answer to an earlier request is open."""

    def replayed(self) -> bytes:
        """Return the bytes of the open request that a lost frontend has read; b"" if there is none."""

    @property
    def has_answer(self) -> bool:
        """Whether bytes of the open request's answer were written."""

    @property
    def is_between_requests(self) -> bool:
        """Whether a lost frontend has answered a request, and no other one has begun."""

    def on_pipelined(self) -> None:
        """A request begins amid the bytes that were read last, or before the answer to an earlier one."""

    def on_request_end(self) -> None:
        """The rest of a request that was answered before its end has come."""

    def expect_last(self) -> None:
        """The next write is an answer without the app, and the connection closes after it."""

    def on_answered(self, state: State) -> None:
        """The last piece of an answer was written. `state`: of the connection after it."""

    def answer(self, app: ASGIApp, cycle: Cycle, state_after: Callable[[], State]) -> ASGIApp:
        """Return an app that answers a request by `app`, piece by piece through the journal. `state_after`: returns the
        connection's state after the answer."""

    def close(self) -> None:
        """End with the connection."""


class NotKept:
    """A connection without a journal."""

    has_answer = is_between_requests = False

    def wrap(self, transport: asyncio.Transport) -> asyncio.Transport:
        return transport

    def reader(self, protocol: asyncio.Protocol) -> asyncio.BaseProtocol:
        return protocol

    def put_in(self, num_bytes: int, *, is_early: bool) -> None: ...

    def replayed(self) -> bytes:
        return b""

    def on_pipelined(self) -> None: ...

    def on_request_end(self) -> None: ...

    def expect_last(self) -> None: ...

    def on_answered(self, state: State) -> None: ...

    def answer(self, app: ASGIApp, cycle: Cycle, state_after: Callable[[], State]) -> ASGIApp:
        return app

    def close(self) -> None: ...


class CountedConnection(NotKept):
    """A connection that cannot be kept. By its slot the supervisor counts the answers that a loss cuts."""

    def __init__(self, journal: HttpJournal, slot: Slot) -> None:
        self._journal, self._slot = journal, slot

    def put_in(self, num_bytes: int, *, is_early: bool) -> None:
        self._slot.put_in(num_bytes, 0)

    def on_request_end(self) -> None:
        if self._slot.record.state is State.CLOSING:
            self._slot.end(State.IDLE)

    def expect_last(self) -> None:
        self._slot.end(State.CLOSING)

    def on_answered(self, state: State) -> None:
        self._slot.end(state)

    def close(self) -> None:
        self._journal.free_slot(self._slot)


class KeptConnection:
    """A connection with a slot, and with a duplicate in the supervisor."""

    transport: KeptTransport  # set by `wrap`

    def __init__(
        self,
        keeper: ConnectionKeeper,
        slot: Slot,
        connection: socket.socket,
        unsent: bytes = b"",
        replayed: bytes = b"",
    ) -> None:
        """`unsent`, `replayed`: bytes that a lost frontend has left to be written, and to be read."""
        self.slot, self.keeper = slot, keeper
        self.socket, self._unsent, self._replayed = connection, unsent, replayed

    def wrap(self, transport: asyncio.Transport) -> asyncio.Transport:
        if self._unsent:
            transport.write(self._unsent)
            self._unsent = b""
        self.transport = KeptTransport(transport, self.slot)
        return self.transport  # type: ignore[return-value]

    def reader(self, protocol: asyncio.Protocol) -> asyncio.BaseProtocol:
        return JournalReader(protocol, self._room)

    def _room(self) -> memoryview:
        return self.slot.room(self.transport.get_write_buffer_size())

    def put_in(self, num_bytes: int, *, is_early: bool) -> None:
        if is_early:
            self.slot.lose(Reason.PIPELINE)
        self.slot.put_in(num_bytes, self.transport.get_write_buffer_size())

    def replayed(self) -> bytes:
        request, self._replayed = self._replayed, b""
        return request

    @property
    def has_answer(self) -> bool:
        return self.slot.record.out_end > self.slot.record.answer_begin

    @property
    def is_between_requests(self) -> bool:
        return self.slot.record.state is State.IDLE and self.slot.record.out_end > 0

    def on_pipelined(self) -> None:
        self.slot.begin_early(self.transport.get_write_buffer_size())

    def on_request_end(self) -> None:
        if self.slot.record.state is State.CLOSING and not self.transport.is_closing():
            self.slot.end(State.IDLE)

    def expect_last(self) -> None:
        self.transport.expect_piece(None, State.CLOSING)

    def on_answered(self, state: State) -> None:
        """Do nothing: the last piece has said it."""

    def answer(self, app: ASGIApp, cycle: Cycle, state_after: Callable[[], State]) -> ASGIApp:
        return KeptAnswer(app, cycle, self, state_after)

    def continuation(self) -> Continuation:
        """Return the state of the open request, with which its handler begins or goes on."""
        record = self.slot.record
        if record.state is not State.OPEN:
            return new_continuation()
        shown = self.slot.shown()
        return Continuation(
            nonce=record.nonce,
            created=record.created,
            answers=answers_of(shown),
            sources=shown.sources,
            num_events=record.num_events,
            num_cached=record.num_cached,
            seed=record.seed,
            is_resumed=record.has_head,
            num_losses=record.losses,
            is_kept=True,
        )

    def close(self) -> None:
        self.keeper.close(self)


class KeptAnswer:
    """ASGI app around the answer to one request: the messages of `app` become pieces of the journal."""

    def __init__(self, app: ASGIApp, cycle: Cycle, kept: KeptConnection, state_after: Callable[[], State]) -> None:
        self._app, self._cycle, self._kept, self._state_after = app, cycle, kept, state_after
        self._is_head_only = self._has_chunks = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._is_head_only = scope["method"] == "HEAD"
        with working_on(self._kept.continuation()):
            await self._app(scope, receive, self._send)

    async def _send(self, message: Message) -> None:
        cycle, kept = self._cycle, self._kept
        if self._has_chunks and message.get("more_body") and (body := message.get("body")):  # every token comes here
            shown = message.get(SHOWN)
            if shown is None:
                kept.slot.lose(Reason.ENDPOINT)
            if cycle.flow.write_paused and not cycle.disconnected:
                await cycle.flow.drain()
            if not cycle.disconnected:  # written as uvicorn does it
                kept.transport.write_piece(b"%x\r\n%b\r\n" % (len(body), body), shown)
            return
        kind = message["type"]
        if kind == TOKENS:
            kept.slot.put_tokens(message[SHOWN])
        elif kind == "http.response.start":
            await self._send_head(message)
        elif message.get("more_body"):
            shown = message.get(SHOWN)
            if shown is None:
                kept.slot.lose(Reason.ENDPOINT)
            kept.transport.expect_piece(shown, None)
            await cycle.send(message)
        else:
            self._has_chunks = False
            kept.transport.expect_piece(message.get(SHOWN), self._state_after())
            await cycle.send(message)
            kept.transport.flush()

    async def _send_head(self, message: Message) -> None:
        """Send a head, or only prepare uvicorn for the rest of a stream if the client has its head already. Only a
        successful stream can go on with the rest."""
        kept = self._kept
        is_muted = kept.slot.record.has_head
        is_stream = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
        if is_muted and (message["status"] != 200 or not is_stream):
            kept.keeper.journal.count_cut(Reason.CHANGED)
            self._cycle.disconnected = True  # uvicorn sends nothing more
            kept.transport.abort()
            return
        kept.transport.expect_head(is_muted=is_muted)
        await self._cycle.send(message)
        self._has_chunks = bool(self._cycle.chunked_encoding) and not self._is_head_only


class ConnectionKeeper:
    """Owner of the journal and of the channel to the supervisor."""

    def __init__(self, journal: HttpJournal, keeper: Keeper, *, is_on: bool) -> None:
        """`is_on`: whether connections are kept; otherwise the answers are counted that losses cut."""
        self.journal, self._keeper, self._is_on = journal, keeper, is_on

    def fileno(self) -> int:
        return self._keeper.fileno()

    def accept(self) -> tuple[socket.socket, int]:
        """Return a new connection and its number. Errors as of Keeper.accept."""
        accepted = self._keeper.accept()
        maybe_fail("http.accept")
        self.journal.count_taken()
        return accepted

    def open(self, connection: socket.socket, number: int, uncovered: Reason) -> Kept:
        """Return the journal of a new connection. `number`: the supervisor's, 0: it does not hold it. `uncovered`: why
        it cannot be kept, or NONE."""
        if not self._is_on:
            uncovered = Reason.OFF
        if uncovered is Reason.NONE:
            slot = self.journal.open_slot(connection=number)
            maybe_fail("http.open")
            if slot is not None:
                return KeptConnection(self, slot, connection)
        else:
            slot = self.journal.open_slot(uncovered)
        if number:
            self._keeper.drop(number)
        return NotKept() if slot is None else CountedConnection(self.journal, slot)

    def drop(self, number: int) -> None:
        """Let the supervisor close a connection that has ended."""
        self._keeper.drop(number)

    def close(self, kept: KeptConnection) -> None:
        """End with a connection that was kept. The supervisor's descriptor would hold back its end."""
        with contextlib.suppress(OSError):
            kept.socket.shutdown(socket.SHUT_RDWR)
        self._keeper.drop(kept.slot.record.connection)
        self.journal.free_slot(kept.slot)
