"""The HTTP server: uvicorn on the frontend's own event loop. Imported only when --http is given.

One thread runs the frontend's turns and the HTTP handlers, so that a token goes from the core's message to the
client's socket without a lock, a queue or a second process.

ZeroMQ's descriptors are edge-triggered: they say that something happened, not that something is there. So each turn
ends with a look at what the sockets still hold, and what does is read in the next turn. However many handlers ask for
a turn, one is pending at most: all that they want sent goes out together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn
import uvloop
import zmq

from ..ipc.config import http_endpoint
from ..ipc.engine_spec import EngineSpec
from ..ipc.errors import ConfigError
from .server_acceptor import Acceptor
from .server_app import new_app
from .server_engine import LocalEngine
from .service import Frontend

if TYPE_CHECKING:
    from .process import FrontendProcess

BACKLOG = 2048
FAREWELL_S = 2  # how long answers that are being written may take when the engine stops


def run_with_http(
    process: FrontendProcess, frontend: Frontend, spec: EngineSpec, address: str, on_listening: Callable[[str], None]
) -> None:
    """Serve until the process is stopping; raises ConfigError if nothing can listen at `address`."""
    listener = _bind(address)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    on_listening(f"http://{shown}:{port}")
    uvloop.run(_serve(process, frontend, spec, listener))


def _bind(address: str) -> socket.socket:
    host, port = http_endpoint(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a replacement takes the port over
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --http {address}: {error.strerror or error}; choose another") from None
    listener.setblocking(False)
    return listener


async def _serve(process: FrontendProcess, frontend: Frontend, spec: EngineSpec, listener: socket.socket) -> None:
    turns = TurnLoop(process)
    app = new_app(LocalEngine(frontend, turns.wake), frontend, spec)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=FAREWELL_S,
    )
    config.load()
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # a line for each malformed request would fill a disk
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    server.servers = [_accept(listener, server, frontend)]  # type: ignore[list-item]
    server.started = True
    await turns.run()  # uvicorn's own main loop would wake ten times a second to do nothing
    process.stop()
    with contextlib.suppress(asyncio.CancelledError):
        await server.shutdown(sockets=[listener])


def _accept(listener: socket.socket, server: uvicorn.Server, frontend: Frontend) -> Acceptor:
    """Have `server` serve whoever connects."""
    protocol_class = server.config.http_protocol_class

    def new_protocol() -> asyncio.Protocol:
        return protocol_class(config=server.config, server_state=server.server_state, app_state={})  # type: ignore[call-arg]

    def on_exhausted() -> None:
        frontend.counts["accept_paused_for_descriptors"] += 1

    return Acceptor(listener, new_protocol, on_exhausted)


class TurnLoop:
    """`run` returns when the process is stopping, and raises what a turn raises."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._is_pending = False
        self._timer: asyncio.TimerHandle | None = None
        self._end: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        """Have a turn soon; from the loop's own thread."""
        if not self._is_pending and not self._end.done():
            self._is_pending = True
            self._loop.call_soon(self._turn)

    async def run(self) -> None:
        fds = [int(each.getsockopt(zmq.FD)) for each in self._process.sockets]
        fds.append(self._process.wakeup_fd)
        for fd in fds:
            self._loop.add_reader(fd, self.wake)
        self.wake()
        try:
            await self._end
        finally:
            for fd in fds:
                self._loop.remove_reader(fd)
            if self._timer is not None:
                self._timer.cancel()

    def _turn(self) -> None:
        self._is_pending = False
        if self._end.done():
            return
        try:
            self._process.turn()
        except Exception as error:
            self._end.set_exception(error)
            return
        if self._process.is_stopping:
            self._end.set_result(None)
        elif any(int(each.getsockopt(zmq.EVENTS)) & zmq.POLLIN for each in self._process.sockets):
            self.wake()
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait_s = self._process.seconds_to_tick(time.monotonic())
        if wait_s is not None:
            self._timer = self._loop.call_later(wait_s + 0.001, self.wake)
