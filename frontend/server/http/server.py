"""The HTTP server: uvicorn on the frontend's own event loop. Imported only if HTTP is served (--http, --uds).

One thread runs the frontend's turns (iterations of its loop) and the HTTP handlers, so that a token goes from the
core's message to the client's socket without a lock, a queue or a second process.

ZeroMQ's descriptors are edge-triggered: they signal an event, not pending data. So each turn ends with a check of the
sockets, and if any is still readable another turn follows. At most one turn is pending, however many handlers ask for
one: their messages are sent together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import uvicorn
import uvloop
import zmq
from starlette.types import ASGIApp

from ....ipc.errors import TokenloomError
from ....ipc.notes.deadly import NONE, ReadingNote
from ....ipc.spec.config.engine_config import EngineConfig
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.version import tokenloom_version
from ...forms.openai.errors import HttpError
from ...listening.http_listeners import is_loopback
from ...listening.journal.journal import MAX_SLOTS, HttpJournal
from ...listening.journal.pages import JournalLimits
from ...listening.journal.record import Reason
from ...listening.keeper import Keeper
from ...listening.tls import new_ssl_context
from ...state.engine_state import EngineState
from ..api.openai.local_engine import LocalEngine
from ..requests.frontend import Frontend
from .acceptor import Acceptor, Source
from .access_log import AccessLog
from .app import GeneratingEndpoints, new_app
from .batches.service import EngineBatches
from .connections import Connections, HttpConnection, connection_limit
from .files.endpoints import FileEndpoints
from .kept.adoption import adopt
from .kept.connection import ConnectionKeeper, Kept
from .peers import Peers
from .streams.resumable import ResumableStreams

logger = logging.getLogger("tokenloom.http")

T = TypeVar("T")

IDLE_S = 75  # keep-alive time of a connection without a request
FAREWELL_S = 2  # time for unfinished answers to end when the engine stops


class KeptFds(NamedTuple):
    """Descriptors inherited from the supervisor."""

    journal: int
    channel: int


class TurnTaker(Protocol):
    """Interface of a frontend process, whose turns run on the HTTP server's event loop."""

    is_stopping: bool
    wakeup_fd: int

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """The ZeroMQ sockets that a turn reads."""
        ...

    def turn(self) -> None:
        """Read all sockets, process the messages and send the results."""
        ...

    def seconds_to_tick(self, now: float) -> float | None:
        """Return the seconds until a turn is due even without new messages; None: no turn is due. `now`: monotonic
        seconds."""
        ...

    def stop(self) -> None:
        """End all requests, and tell their clients that the engine is stopping."""
        ...


def run_with_http(
    process: TurnTaker,
    frontend: Frontend,
    spec: EngineSpec,
    http_host: str,
    kept_fds: KeptFds,
    index: int = 0,
) -> None:
    """Serve HTTP on connections that the supervisor accepts, until the process stops. `http_host`: the address on which
    it listens for TCP connections, if it does. `index`: the number of this frontend."""
    peers = Peers(spec, index)
    channel = Keeper(socket.socket(fileno=kept_fds.channel))
    limits = JournalLimits(
        min(connection_limit(), MAX_SLOTS), spec.config.max_body_bytes, spec.config.http_journal_bytes
    )
    journal = HttpJournal(kept_fds.journal, limits, tokenloom_version())
    keeper = ConnectionKeeper(journal, channel, is_on=spec.config.keep_connections)
    kept = list(channel.take_kept())
    uvloop.run(_serve(process, frontend, spec, http_host, keeper, kept, peers))


async def _serve(
    process: TurnTaker,
    frontend: Frontend,
    spec: EngineSpec,
    http_host: str,
    keeper: ConnectionKeeper,
    kept: Sequence[tuple[int, socket.socket]],
    peers: Peers,
) -> None:
    asyncio.get_running_loop().set_task_factory(partial(_new_task, frontend.note))
    turns = TurnLoop(process)
    engine = LocalEngine(
        frontend,
        turns.wake,
        has_strict_fields=spec.config.strict_fields,
        has_timings=spec.config.enable_per_request_metrics,
        block_size=spec.config.block_size if spec.shares_prefixes else 0,
    )
    state = EngineState(spec, peers.index)
    if frontend.metrics.state is not None:
        frontend.metrics.state.read = state.usage
    generating = GeneratingEndpoints(engine, frontend.metrics, spec, state.responses, peers)
    files = FileEndpoints(state.files, is_strict=spec.config.strict_fields)
    paths = frozenset(each.path for each in generating.of_batches())
    batches = EngineBatches(engine, frontend, spec, state, peers, paths)
    stored = [*files.endpoints(), *batches.endpoints()]
    streams = ResumableStreams(f"{peers.index}-", keeper.journal if spec.config.keep_connections else None)
    app = new_app(engine, frontend, spec, generating.endpoints(), peers, streams, stored)
    log = None if spec.config.access_log == "off" else AccessLog(app, has_all=spec.config.access_log == "all")

    def on_refused(connection: HttpConnection, error: HttpError, why: str) -> None:
        frontend.metrics.on_refused(why)
        if log is not None:
            log.on_refused(connection.client, error)

    server = new_server(log or app)
    connections = Connections(spec.config.http_timeout_s, connection_limit(), on_refused)
    on_exhausted = partial(frontend.counts.update, ["accept_paused_for_descriptors"])

    aside = [asyncio.ensure_future(work) for work in (_learn_form(frontend), state.sweep(), batches.run(app))]
    turns.begin()  # before connections are adopted: if a request of theirs makes this process hang, that is noticed
    await generating.responses.resume()
    streams.restore()
    is_local = bool(http_host) and is_loopback(http_host)
    unread = await adopt(keeper, kept, partial(_new_adopted, server, connections, is_local))
    streams.go_on(log or app)
    listeners = peers.listen()
    sources: list[Source] = [keeper, *listeners]
    acceptors = [
        accept(each, server, connections, spec.config, on_exhausted, keeper, is_local=is_local) for each in sources
    ]
    for connection, number in unread:
        acceptors[0].take(connection, number)
    server.servers = acceptors  # type: ignore[assignment]
    await turns.run()  # instead of uvicorn's main loop, which wakes ten times a second
    for each in aside:
        each.cancel()
    process.stop()
    with contextlib.suppress(asyncio.CancelledError):
        await server.shutdown(sockets=listeners)
    state.close()


async def _learn_form(frontend: Frontend) -> None:
    """Find the form of the model's answers, so that the first chat does not wait for it."""
    try:
        await frontend.forms.choice()
    except TokenloomError as error:
        logger.warning("the form of answers is not known yet: %s", error)


def _new_task(
    note: ReadingNote, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], **options: Any
) -> asyncio.Task[T]:
    """Return a new task. If it is created while a request is worked on, its slices are recorded as work on that
    request."""
    return asyncio.Task(work if note.current == NONE else note.slices(work), loop=loop, **options)


def new_server(app: ASGIApp) -> uvicorn.Server:
    """Return a uvicorn server that is run without its main loop and without sockets of its own."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=FAREWELL_S,
    )
    config.load()
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # else each malformed request logs a line
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


def accept(
    source: Source,
    server: uvicorn.Server,
    connections: Connections,
    config: EngineConfig,
    on_exhausted: Callable[[], None],
    keeper: ConnectionKeeper,
    *,
    is_local: bool,
) -> Acceptor:
    """Take connections from `source` until the returned Acceptor is closed, which leaves the source open.
    `on_exhausted` is called when descriptors run out. `is_local`: TCP connections come from this machine alone."""
    tls = new_ssl_context(config)
    of_tcp = Reason.NONE if tls is None else Reason.TLS

    def new_connection(connection: socket.socket, number: object) -> asyncio.BaseProtocol:
        is_unix = connection.family == socket.AF_UNIX
        uncovered = Reason.UNIX if is_unix else of_tcp
        kept = keeper.open(connection, number if isinstance(number, int) else 0, uncovered)
        protocol = HttpConnection(server.config, server.server_state, connections, is_local or is_unix, kept)
        return kept.reader(protocol)

    return Acceptor(source, new_connection, on_exhausted, lambda: connections.num_open, tls, config.http_timeout_s)


def _new_adopted(
    server: uvicorn.Server, connections: Connections, is_local: bool, kept: Kept, connection: socket.socket
) -> HttpConnection:
    return HttpConnection(server.config, server.server_state, connections, is_local, kept)


class TurnLoop:
    """Scheduler of a process's turns on the event loop: a turn follows events of its sockets, a time, or a call of
    `wake`."""

    def __init__(self, process: TurnTaker) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._is_pending = False
        self._timer: asyncio.TimerHandle | None = None
        self._sockets: Sequence[zmq.Socket[bytes]] = ()  # those whose descriptors are watched
        self._fds: list[int] = []
        self._end: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        """Schedule a turn, unless one is pending. Call it only from the event loop's thread."""
        if not self._is_pending and not self._end.done():
            self._is_pending = True
            self._loop.call_soon(self._turn)

    def begin(self) -> None:
        """Take the first turn; others follow it. If it raises an exception, raise it."""
        self._process.turn()
        self._loop.add_reader(self._process.wakeup_fd, self.wake)
        self._watch(self._process.sockets)
        self.wake()

    async def run(self) -> None:
        """Run turns until the process is stopping. If a turn raises an exception, raise it. Call `begin` before."""
        try:
            await self._end
        finally:
            for fd in (*self._fds, self._process.wakeup_fd):
                self._loop.remove_reader(fd)
            if self._timer is not None:
                self._timer.cancel()

    def _turn(self) -> None:
        self._is_pending = False
        if self._end.done():
            return
        try:
            self._process.turn()
            self._watch(self._process.sockets)
        except Exception as error:
            self._end.set_exception(error)
            return
        if self._process.is_stopping:
            self._end.set_result(None)
        # The descriptor becomes readable once per event, not per message, and a send consumes events, too: the event of
        # a message that arrived after the turn had read its socket may be consumed, and no turn would follow. So EVENTS
        # is checked. Another turn reads the rest, not a loop here, so that handlers and connections run in between.
        elif any(int(each.getsockopt(zmq.EVENTS)) & zmq.POLLIN for each in self._sockets):
            self.wake()
        else:
            self._set_timer()

    def _watch(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        """Let the descriptors of these sockets cause turns, in place of the former sockets' descriptors."""
        if sockets == self._sockets:
            return
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._sockets, self._fds = sockets, [int(each.getsockopt(zmq.FD)) for each in sockets]
        for fd in self._fds:
            self._loop.add_reader(fd, self.wake)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait_s = self._process.seconds_to_tick(time.monotonic())
        if wait_s is not None:
            self._timer = self._loop.call_later(wait_s + 0.001, self.wake)
