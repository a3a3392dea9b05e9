"""HttpListeners: the listening sockets of HTTP, which the supervisor holds while the engine serves.

It accepts the connections for the frontends (launcher/supervisor/frontends/kept_connections.py). While a lost frontend
is replaced, new ones wait in the kernel's queue instead of being refused, and port 0 keeps its number. Knows nothing of
HTTP.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from ...ipc.errors import ConfigError
from ...ipc.sockets.addresses import lock_ipc_address, set_socket_mode, unlink_ipc_address
from ...ipc.sockets.endpoints import http_endpoint
from ...ipc.spec.config.engine_config import EngineConfig
from .keys.api_keys import read_keys

logger = logging.getLogger("tokenloom.supervisor")

BACKLOG = 2048  # unaccepted connections; beyond it the kernel drops new ones, and clients retry by TCP


class HttpListeners:
    """Listening sockets of --http and --uds, with the files of --uds. `addresses`: http[s]://HOST:PORT, unix:PATH."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._sockets: list[socket.socket] = []
        self._ipc_address: str | None = None  # address of our socket file
        self._lock_fd = -1

    def open(self, config: EngineConfig) -> None:
        """Listen on --http and --uds, if given. ConfigError, about the option, if that fails; call `close` even
        then."""
        if config.api_key_file is not None:
            read_keys(Path(config.api_key_file))
        if config.http_address is not None:
            self._listen_tcp(config, config.http_address)
        if config.uds is not None:
            self._listen_unix(os.path.abspath(config.uds), int(config.uds_mode, 8))

    @property
    def sockets(self) -> Sequence[socket.socket]:
        return tuple(self._sockets)

    def _listen_tcp(self, config: EngineConfig, address: str) -> None:
        host, port = http_endpoint(address)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, _, _, place = min(found, key=lambda each: each[0] != socket.AF_INET)
            listener = socket.socket(family, kind)
            self._sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart must not wait for TIME_WAIT
            listener.bind(place)
            listener.listen(BACKLOG)
        except OSError as error:
            option = "--http" if config.http is not None else _option_of(error, has_host=config.host is not None)
            reason = error.strerror or error
            raise ConfigError(
                f"cannot listen on port {port} of {host}: {reason}; choose another with {option}"
            ) from None
        listener.setblocking(False)
        bound, port = listener.getsockname()[:2]
        shown = f"[{bound}]" if ":" in bound else bound
        self.addresses.append(f"{'http' if config.ssl_certfile is None else 'https'}://{shown}:{port}")
        if not config.has_keys and not is_loopback(bound):
            logger.warning(
                "%s has no key: all who can reach it may use the engine; give --api-key, or listen on 127.0.0.1",
                self.addresses[-1],
            )

    def _listen_unix(self, path: str, mode: int) -> None:
        address = f"ipc://{path}"
        self._lock_fd = lock_ipc_address(address, "--uds")
        self._ipc_address = address
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(listener)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # left by a dead engine, since we hold the lock
            os.fchmod(listener.fileno(), mode)  # the file is created with at most this mode
            listener.bind(path)
            set_socket_mode(path, mode)  # undoes the umask
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on --uds {path}: {error.strerror}; choose another") from None
        listener.setblocking(False)
        self.addresses.append(f"unix:{path}")

    def close(self) -> None:
        """Close the sockets and remove the files: the kernel refuses connections from now on. May be repeated."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()
        self.remove_files()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def remove_files(self) -> None:
        """Remove the socket file and the lock file of --uds."""
        if self._ipc_address is not None:
            unlink_ipc_address(self._ipc_address)
            self._ipc_address = None


def _option_of(error: OSError, *, has_host: bool) -> str:
    """Return the option to change after `error`, of --host and --port."""
    is_about_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    return "--host" if has_host and is_about_host else "--port"


def is_loopback(host: str) -> bool:
    """Return whether the numeric address `host` is reachable from this machine only."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
