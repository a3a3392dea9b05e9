"""ZeroMQ sockets with the engine's common settings.

No high-water mark, since the protocol limits messages in flight (credits, steps in flight); bounded message sizes; no
lingering, so that a process exits without waiting for a dead peer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq

from .door import Door

MAX_CLIENT_MESSAGE_BYTES = 64 << 20  # a prompt of 16M token ids; ZeroMQ drops larger messages
MAX_INTERNAL_MESSAGE_BYTES = 1 << 30


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    *,
    identity: bytes | None = None,
    max_message_bytes: int = MAX_INTERNAL_MESSAGE_BYTES,
) -> zmq.Socket[bytes]:
    """Create a socket of `kind` (zmq.ROUTER …), neither bound nor connected."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms, at first: finds the successor of a lost peer quickly
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a peer that is gone raises
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting identity replaces its old connection
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    return socket


def bind(socket: zmq.Socket[bytes], address: str, mode: int = 0o600) -> Door | None:
    """Bind a socket. For an ipc address return its Door, to be closed before the socket; the socket file has the
    permissions `mode` from the first connection on. ZMQError, OSError or Overloaded if that fails."""
    if not address.startswith("ipc://"):
        socket.bind(address)
        return None
    door = Door(address.removeprefix("ipc://"), mode)
    socket.setsockopt(zmq.USE_FD, door.fd)
    socket.bind(address)
    return door


def receive(socket: zmq.Socket[bytes], num_parts: int = 1) -> Iterator[list[bytes]]:
    """Yield all waiting messages as lists of `num_parts` parts, without blocking.

    Of a message with more parts, the first num_parts - 1 and the last are kept; a message with fewer parts is dropped.
    """
    with contextlib.suppress(zmq.Again):  # polling first costs half as much as this exception
        while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            parts = socket.recv_multipart(zmq.NOBLOCK)
            if len(parts) >= num_parts:
                yield [*parts[: num_parts - 1], parts[-1]]


def receive_uncopied(socket: zmq.Socket[bytes]) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the waiting messages of a ROUTER socket: the sender's identity and the last part, which stays in ZeroMQ's
    memory as long as a view of it lives. Copying one of 20 MB takes about 10 ms."""
    with contextlib.suppress(zmq.Again):
        while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if len(parts) >= 2:
                yield parts[0].bytes, parts[-1].buffer
