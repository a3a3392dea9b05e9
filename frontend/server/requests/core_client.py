"""CoreClient: the frontend's messages to one core, and whether it is connected. FrontendOutbox: all unsent messages.

A core that is new, or has forgotten this frontend, needs a Hello and then all open requests. Until its Welcome only
Hello and prefetches are sent. Knows no client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ....ipc.messages.base import Hello, Ping
from ....ipc.messages.core import AbortRequests, EngineCoreRequest, FrontendToCore, GatewayHello, Prefetch
from ....ipc.messages.orders import Order
from ....ipc.messages.supervisor import ReplicaDrained, Served


@dataclass
class FrontendOutbox:
    """Messages that the frontend wants sent. The owner of its sockets empties it after each turn, clients first:
    a send to a client that is gone adds aborts for the core."""

    to_clients: list[tuple[bytes, bytes]] = field(default_factory=list)  # identity, frame
    to_cores: list[list[FrontendToCore]] = field(default_factory=lambda: [[]])  # by replica
    to_supervisor: list[Order | ReplicaDrained | Served] = field(default_factory=list)


class CoreClient:
    """Messages to a core, put into its part of the outbox. While it is not up, submits, aborts and pings are
    dropped."""

    def __init__(self, hello: Hello | GatewayHello, unsent: list[FrontendToCore]) -> None:
        self._hello, self._unsent = hello, unsent
        self.is_up = False  # Frontend sets it on Welcome

    def connect(self) -> None:
        """Queue Hello, and count the core as not up: at the start, or if the core does not know this frontend."""
        self.is_up = False
        self._unsent.append(self._hello)

    def submit(self, request: EngineCoreRequest) -> None:
        if self.is_up:
            self._unsent.append(request)

    def abort(self, keys: list[int]) -> None:
        if keys and self.is_up:
            self._unsent.append(AbortRequests(keys=keys))

    def prefetch(self, message: Prefetch) -> None:
        self._unsent.append(message)

    def ping(self) -> None:
        """Queue a ping if the core is up. A core that does not know this frontend replies Unknown."""
        if self.is_up:
            self._unsent.append(Ping())
