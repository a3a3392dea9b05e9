"""Door: a listening unix socket that accepts no new connections while few descriptors are left.

ZeroMQ accepts connections itself, and aborts the process if no descriptor is left for one at a unix socket. So a thread
counts the open descriptors at each connection, and renames the socket before they run out: ZeroMQ clients retry until
the name is back. The reserve has descriptors for the connections that already wait to be accepted, and for those that
are accepted before the thread gets the processor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from pathlib import Path

from ..process.descriptors import descriptor_limit, num_open
from ..process.log import is_worth_a_line
from ..shortages.threads import start_thread
from .addresses import closed_name, set_socket_mode, unlink_socket

logger = logging.getLogger("tokenloom.ipc")

LEAST_RESERVE = 256  # descriptors, or half of the limit; ZeroMQ takes 10,000 to 40,000 connections a second
RESERVE_PART = 16  # the reserve is 1 / RESERVE_PART of a high limit
BACKLOG_PART = 8  # of the reserve is for waiting connections: on a busy machine the thread may be 10 ms late
RETRY_S = 0.25  # between two counts while the door is closed


class Door:
    """Owner of the socket's two names and of the thread. `fd`, the listening socket, belongs to ZeroMQ once it is
    bound."""

    def __init__(self, path: str, mode: int) -> None:
        """Listen at `path`, replacing a dead socket, with the permissions `mode` from the first connection on. OSError
        if that fails, Overloaded if no thread can be started."""
        self._path, self._closed_path = Path(path), closed_name(Path(path))
        limit = descriptor_limit()
        self._reserve = max(limit // RESERVE_PART, min(LEAST_RESERVE, limit // 2))
        self._is_closed, self._num_closings = False, 0
        for each in (self._path, self._closed_path):
            unlink_socket(each)
        with contextlib.ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(path)
            on_failure.callback(unlink_socket, self._path)
            set_socket_mode(path, mode)
            status = os.lstat(path)
            self._identity = (status.st_dev, status.st_ino)
            listener.listen(min(self._reserve // BACKLOG_PART, socket.SOMAXCONN))
            listener.setblocking(False)
            self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            on_failure.callback(os.close, self._stop_fd)
            self._events = on_failure.enter_context(select.epoll())
            self._events.register(self._stop_fd, select.EPOLLIN)
            self._events.register(listener, select.EPOLLIN | select.EPOLLET)
            self._thread = start_thread("door", self._run)
            on_failure.pop_all()
            self.fd = listener.detach()

    def close(self) -> None:
        """Stop the thread and remove the socket's names, unless a successor listens there."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        self._events.close()
        os.close(self._stop_fd)
        for path in (self._path, self._closed_path):
            with contextlib.suppress(OSError):
                if self._is_ours(path):
                    path.unlink()

    def _run(self) -> None:
        while True:
            events = self._events.poll(RETRY_S if self._is_closed else None)
            if any(fd == self._stop_fd for fd, _ in events):
                return
            has_room = num_open() < descriptor_limit() - self._reserve
            if has_room == self._is_closed:
                self._move()

    def _move(self) -> None:
        """Rename the socket from the open to the closed name or back. Never replaces a file."""
        old, new = (self._closed_path, self._path) if self._is_closed else (self._path, self._closed_path)
        try:
            if not self._is_ours(old):
                return
            os.link(old, new)
            old.unlink()
        except OSError as error:
            logger.error("%s cannot become %s: %s", old, new.name, error.strerror)
            return
        self._is_closed = not self._is_closed
        self._num_closings += self._is_closed
        if is_worth_a_line(self._num_closings):
            logger.warning(
                "%s: %s (%d of %d descriptors are open): raise the limit of open files (ulimit -n, LimitNOFILE)",
                self._path,
                "new connections wait until others end" if self._is_closed else "takes connections again",
                num_open(),
                descriptor_limit(),
            )

    def _is_ours(self, path: Path) -> bool:
        status = os.lstat(path)
        return (status.st_dev, status.st_ino) == self._identity
