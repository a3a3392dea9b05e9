"""Acceptor: takes new connections as long as file descriptors are left.

They come from the supervisor, which has accepted them (listening/keeper.py), or from a listening socket. When
descriptors run out, libuv accepts new connections and resets them at once. This class leaves them where they wait until
other connections have closed, and reserves some descriptors for the engine's own files and sockets. It has the methods
of asyncio.Server that uvicorn calls.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from ssl import SSLContext
from typing import Any, Protocol

from ....ipc.process.descriptors import descriptor_limit
from ...listening.exhaustion import MAX_ACCEPTS, OUT_OF_RESOURCES, PAUSE_S, warn_of_pause

MAX_RESERVE = 64  # descriptors that HTTP connections may not use once NUM_PROBES of them are open
NUM_PROBES = 16  # so that probes are answered even if other sockets hold all other descriptors
LEAST_RESERVE = 8  # descriptors that no HTTP connection may use


class Source(Protocol):
    """Where new connections come from."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while connections wait."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a new connection, and its number if it has one. BlockingIOError if there is none, EOFError if there
        will be none."""


class Acceptor:
    """Acceptor of one source. Owns the tasks that set up its new connections, including their TLS
    handshakes."""

    def __init__(
        self,
        source: Source,
        new_protocol: Callable[[socket.socket, Any], asyncio.BaseProtocol],
        on_exhausted: Callable[[], None],
        num_open: Callable[[], int],
        tls: SSLContext | None = None,
        tls_handshake_s: float | None = None,
    ) -> None:
        """`source` must be non-blocking. `on_exhausted` is called each time that accepting is paused. `num_open`
        returns the number of open HTTP connections. `tls`: of connections that are no unix sockets."""
        self._source, self._new_protocol, self._on_exhausted = source, new_protocol, on_exhausted
        self._tls, self._tls_handshake_s, self._num_open = tls, tls_handshake_s, num_open
        self._loop = asyncio.get_running_loop()
        self._setups: set[asyncio.Task[None]] = set()
        self._num_pauses = 0
        self._timer: asyncio.TimerHandle | None = None
        limit = descriptor_limit()
        self._highest_fd = limit - min(MAX_RESERVE, limit // 4)
        self._highest_probe = limit - LEAST_RESERVE
        self._loop.add_reader(source, self._accept_all)

    def close(self) -> None:
        """Stop accepting. Connections that are open stay open."""
        self._loop.remove_reader(self._source)
        if self._timer is not None:
            self._timer.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._setups, return_exceptions=True)

    def _accept_all(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                self._check_room()
                accepted = self._source.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except EOFError:
                self.close()
                return
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    raise
                self._pause(error)
                return
            self.take(*accepted)

    def take(self, connection: socket.socket, number: Any) -> None:
        """Begin with a connection that was accepted."""
        connection.setblocking(False)
        task = self._loop.create_task(self._set_up(self._new_protocol(connection, number), connection))
        self._setups.add(task)
        task.add_done_callback(self._setups.discard)

    def _check_room(self) -> None:
        """Raise OSError (EMFILE) if few descriptors are left: the kernel hands out the lowest free one, so a high one
        shows it."""
        fd = os.dup(self._source.fileno())
        os.close(fd)
        has_share = self._num_open() + len(self._setups) >= NUM_PROBES
        if fd >= (self._highest_fd if has_share else self._highest_probe):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _pause(self, error: OSError) -> None:
        self._num_pauses += 1
        self._on_exhausted()
        warn_of_pause(error, self._num_pauses)
        self._loop.remove_reader(self._source)
        self._timer = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._source, self._accept_all)

    async def _set_up(self, protocol: Any, connection: socket.socket) -> None:
        has_tls = self._tls is not None and connection.family != socket.AF_UNIX
        options: dict[str, Any] = {"ssl": self._tls, "ssl_handshake_timeout": self._tls_handshake_s}
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, **(options if has_tls else {}))
        except (TimeoutError, OSError) as error:  # the client has closed, or does not speak TLS
            protocol.connection_lost(error)
            connection.close()
