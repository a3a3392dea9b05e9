"""TierLink: the core's socket to the tier process, while there is one."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from ...ipc.channel import Channel
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.messages.tier import CoreToTier, TierToCore
from ...ipc.sockets import new_socket


class TierLink:
    """Connects to each new tier process; a message is dropped while there is none."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec) -> None:
        self._context, self._spec = context, spec
        self._channel: Channel[TierToCore, CoreToTier] | None = None

    @property
    def wakers(self) -> list[zmq.Socket[bytes]]:
        """The socket to poll, if there is one."""
        return [] if self._channel is None else [self._channel.socket]

    def connect(self, number: int) -> None:
        """Connect to tier process `number`."""
        self.close()
        socket = new_socket(self._context, zmq.DEALER)
        socket.connect(self._spec.endpoints.tier_of(number))
        self._channel = Channel(socket, TierToCore, "tier process")

    def send(self, message: CoreToTier) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def receive(self) -> Iterator[TierToCore]:
        if self._channel is not None:
            yield from self._channel.receive()

    def close(self) -> None:
        """Drop the connection and all messages in it."""
        if self._channel is not None:
            self._channel.socket.close(linger=0)
            self._channel = None
