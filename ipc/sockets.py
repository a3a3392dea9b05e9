"""ZeroMQ sockets with the settings that every socket of the engine shares.

No high-water mark inside the engine (flow control is the protocol's: credits, steps in flight), bounded message
sizes, and no lingering: a process that ends does not wait for a peer that is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq

MAX_CLIENT_MESSAGE_BYTES = 64 << 20  # a prompt of 16M token ids; larger ones are dropped by ZeroMQ itself
MAX_INTERNAL_MESSAGE_BYTES = 1 << 30


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    *,
    identity: bytes | None = None,
    max_message_bytes: int = MAX_INTERNAL_MESSAGE_BYTES,
) -> zmq.Socket[bytes]:
    """A socket of `kind` (zmq.ROUTER …), not yet bound or connected."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms, at first: who takes the place of a lost peer is found at once
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a peer that is gone raises instead of vanishing
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting identity takes its place at once
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    return socket


def receive(socket: zmq.Socket[bytes], num_parts: int = 1) -> Iterator[list[bytes]]:
    """The messages that have come, until none is left; of one with more parts the last counts, of one with fewer
    nothing. Whether there is one is asked first: the exception that says that there is none costs twice as much."""
    with contextlib.suppress(zmq.Again):
        while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            parts = socket.recv_multipart(zmq.NOBLOCK)
            if len(parts) >= num_parts:
                yield [*parts[: num_parts - 1], parts[-1]]
