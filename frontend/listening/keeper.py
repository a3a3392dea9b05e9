"""Keeper: the channel on which a frontend gives the supervisor a duplicate of each HTTP connection.

A connection ends only when its last descriptor is closed, so the kernel goes on with it while a lost frontend is
replaced. The supervisor reads no byte of it. Messages, each a packet on a socket pair that the frontend inherits:

    frontend → supervisor   O slot + descriptor   a connection was accepted
                            C slot                it was closed
                            R slot                tell the connections that the frontend before has left, from this slot
    supervisor → frontend   K slot … + descriptors, empty after the last one
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence

from ...ipc.errors import ProtocolError
from ...ipc.process.log import is_worth_a_line

logger = logging.getLogger("tokenloom.http")

MAX_FDS = 200  # in a packet; the kernel allows 253
MAX_PACKET_BYTES = 1 + 4 * MAX_FDS
OPENED, CLOSED, REPORT, KEPT = b"OCRK"
RETRY_S = 0.05
ANSWER_S = 30.0  # longest wait for the supervisor at the start


def packet(kind: int, slots: Sequence[int] = ()) -> bytes:
    """Encode a message about these slots."""
    return struct.pack(f"<B{len(slots)}I", kind, *slots)


def parse(data: bytes) -> tuple[int, tuple[int, ...]]:
    """Return the kind of a message and its slots; only KEPT may have none. ProtocolError if it is no message."""
    has_slots = len(data) > 1 or data[:1] == bytes((KEPT,))
    if len(data) % 4 != 1 or data[0] not in (OPENED, CLOSED, REPORT, KEPT) or not has_slots:
        raise ProtocolError(f"a packet about HTTP connections begins with {data[:8]!r} and has {len(data)} bytes")
    kind, *slots = struct.unpack(f"<B{len(data) // 4}I", data)
    return kind, tuple(slots)


class Keeper:
    """The frontend's end of the channel. If it is full, connections stay uncovered until a later attempt."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unsent: deque[tuple[int, int, socket.socket | None]] = deque()  # kind, slot, connection
        self._timer: asyncio.TimerHandle | None = None
        self._num_full = 0

    def take_kept(self) -> Iterator[tuple[int, socket.socket]]:
        """Yield slot and descriptor of each connection that the frontend before has left. Call it before the event loop
        runs. TimeoutError if the supervisor does not answer."""
        self._channel.settimeout(ANSWER_S)
        first = 0
        while True:
            self._channel.send(packet(REPORT, [first]))
            data, fds, _, _ = socket.recv_fds(self._channel, MAX_PACKET_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            _, slots = parse(data)
            yield from zip(slots, (socket.socket(fileno=fd) for fd in fds), strict=False)  # fewer if none is free
            if not slots:
                break
            first = slots[-1] + 1
        self._channel.setblocking(False)

    def keep(self, slot: int, connection: socket.socket) -> None:
        """Let the supervisor hold a connection."""
        self._unsent.append((OPENED, slot, connection))
        self._send()

    def drop(self, slot: int) -> None:
        """Let it close its descriptor of a connection that has ended."""
        self._unsent.append((CLOSED, slot, None))
        self._send()

    def _send(self) -> None:
        while self._unsent:
            kind, slot, connection = self._unsent[0]
            fds = [] if connection is None or connection.fileno() < 0 else [connection.fileno()]
            try:
                socket.send_fds(self._channel, [packet(kind, [slot])], fds)
            except OSError as error:  # full, or too many descriptors are on their way
                self._wait(error)
                return
            self._unsent.popleft()

    def _wait(self, error: OSError) -> None:
        self._num_full += 1
        if is_worth_a_line(self._num_full):
            logger.warning(
                "the supervisor does not hold %d HTTP connections yet: %s", len(self._unsent), error.strerror
            )
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._timer = None
        self._send()
