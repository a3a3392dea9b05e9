"""Keeper: the channel on which a frontend gets each HTTP connection from the supervisor, which has accepted it.

The supervisor keeps a descriptor, too. A connection ends only when its last descriptor is closed, so the kernel goes on
with it while a lost frontend is replaced, from its first moment on. The supervisor reads no byte of it. Messages, each
a packet on a socket pair that the frontend inherits; connections have numbers:

    supervisor → frontend   N number + descriptor       a connection was accepted
                            K number … + descriptors    those that the frontend before has left; empty after the last
    frontend → supervisor   C number                    it was closed, or the supervisor shall not keep it
                            R number                    tell those that were left, from this number on
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence

from ...ipc.errors import ProtocolError
from ...ipc.process.log import is_worth_a_line

logger = logging.getLogger("tokenloom.http")

MAX_FDS = 200  # in a packet; the kernel allows 253
MAX_PACKET_BYTES = 1 + 4 * MAX_FDS
NEW, CLOSED, REPORT, KEPT = b"NCRK"
MAX_NUMBER = (1 << 31) - 1  # of a connection; 0 is none
RETRY_S = 0.05
ANSWER_S = 30.0  # longest wait for the supervisor at the start


def packet(kind: int, numbers: Sequence[int] = ()) -> bytes:
    """Encode a message about these connections."""
    return struct.pack(f"<B{len(numbers)}I", kind, *numbers)


def parse(data: bytes) -> tuple[int, tuple[int, ...]]:
    """Return the kind of a message and its numbers; only KEPT may have none. ProtocolError if it is no message."""
    has_numbers = len(data) > 1 or data[:1] == bytes((KEPT,))
    if len(data) % 4 != 1 or data[0] not in (NEW, CLOSED, REPORT, KEPT) or not has_numbers:
        raise ProtocolError(f"a packet about HTTP connections begins with {data[:8]!r} and has {len(data)} bytes")
    kind, *numbers = struct.unpack(f"<B{len(data) // 4}I", data)
    return kind, tuple(numbers)


class Keeper:
    """The frontend's end of the channel. If it is full, messages wait for a later attempt."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unsent: deque[int] = deque()  # numbers of connections that have ended
        self._timer: asyncio.TimerHandle | None = None
        self._num_full = 0

    def take_kept(self) -> Iterator[tuple[int, socket.socket]]:
        """Yield number and socket of each connection that the frontend before has left. Call it before the event loop
        runs. TimeoutError if the supervisor does not answer."""
        self._channel.settimeout(ANSWER_S)
        first = 0
        while True:
            self._channel.send(packet(REPORT, [first]))
            data, fds, _, _ = socket.recv_fds(self._channel, MAX_PACKET_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            _, numbers = parse(data)
            yield from zip(numbers, (socket.socket(fileno=fd) for fd in fds), strict=False)  # fewer if none is free
            if not numbers:
                break
            first = numbers[-1] + 1
        self._channel.setblocking(False)

    def fileno(self) -> int:
        return self._channel.fileno()

    def accept(self) -> tuple[socket.socket, int]:
        """Return the next new connection and its number. BlockingIOError if there is none now, EOFError if the
        supervisor has ended, OSError (EMFILE) if no descriptor is free."""
        data, fds, _, _ = socket.recv_fds(self._channel, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise EOFError("the supervisor has closed the channel of HTTP connections")
        _, (number,) = parse(data)
        if not fds:
            self.drop(number)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return socket.socket(fileno=fds[0]), number

    def drop(self, number: int) -> None:
        """Let the supervisor close its descriptor of a connection."""
        self._unsent.append(number)
        self._send()

    def _send(self) -> None:
        while self._unsent:
            try:
                self._channel.send(packet(CLOSED, [self._unsent[0]]))
            except OSError as error:  # full
                self._wait(error)
                return
            self._unsent.popleft()

    def _wait(self, error: OSError) -> None:
        self._num_full += 1
        if is_worth_a_line(self._num_full):
            logger.warning(
                "the supervisor still holds %d HTTP connections that have ended: %s", len(self._unsent), error.strerror
            )
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._timer = None
        self._send()
