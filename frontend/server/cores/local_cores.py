"""LocalCores: a frontend's sockets to the cores of its own engine. The supervisor reports when cores start and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import zmq

from ....ipc.messages.core import CoreToFrontend, FrontendToCore
from ....ipc.messages.orders import Order
from ....ipc.messages.supervisor import Progress
from ....ipc.sockets.channel import Channel
from ....ipc.sockets.zmq_sockets import new_socket
from ....ipc.spec.config.engine_spec import EngineSpec

NEVER = float("inf")  # monotonic time of an event that never comes


class LocalCores:
    """One socket for each replica's core."""

    next_at = NEVER

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, identity: bytes, counts: Counter[str]
    ) -> None:
        self._channels: list[Channel[CoreToFrontend, FrontendToCore]] = []
        for replica in range(spec.config.data_parallel_size):
            socket = new_socket(context, zmq.DEALER, identity=identity)
            socket.connect(spec.endpoints.of_replica(replica).core)
            self._channels.append(Channel(socket, CoreToFrontend, "core", counts))

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return [channel.socket for channel in self._channels]

    def receive(self, now: float) -> Iterator[tuple[int, CoreToFrontend]]:
        """Yield all received messages of cores, each with the number of its replica."""
        for replica, channel in enumerate(self._channels):
            for message in channel.receive():
                yield replica, message

    def send(self, unsent: Sequence[list[FrontendToCore]]) -> None:
        """Send each core its messages from `unsent`, a list for each replica, and clear the lists."""
        for channel, messages in zip(self._channels, unsent, strict=True):
            for message in messages:
                channel.send(message)
            messages.clear()

    def complete(self, progress: Progress) -> Progress:
        """Return the supervisor's report unchanged: it covers all cores."""
        return progress

    def take_order(self, order: Order) -> bool:
        """Return False: the supervisor carries out all orders."""
        return False

    def may_begin(self, now: float) -> bool:
        """Return False: the frontend may not serve without a core."""
        return False

    def close(self) -> None:
        for channel in self._channels:
            channel.socket.close(linger=0)  # the core is being stopped too
