"""CoreClient: the frontend's side of its connection to one core. FrontendOutbox: all unsent messages of the frontend.

A core that is new, or no longer knows this frontend, must get a Hello and then all open requests. Until it replies
Welcome, only Hello and prefetches are sent to it. Knows no client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ....ipc.messages.base import Hello, Ping
from ....ipc.messages.core import AbortRequests, EngineCoreRequest, FrontendToCore, GatewayHello, Prefetch
from ....ipc.messages.orders import Order
from ....ipc.messages.supervisor import ReplicaDrained, Served


@dataclass
class FrontendOutbox:
    """Unsent messages of the frontend. The owner of the sockets sends and removes them after each turn, those to
    clients first: a failed send to a client adds aborts for the cores."""

    to_clients: list[tuple[bytes, bytes]] = field(default_factory=list)  # (identity, frame)
    to_cores: list[list[FrontendToCore]] = field(default_factory=lambda: [[]])  # by replica
    to_supervisor: list[Order | ReplicaDrained | Served] = field(default_factory=list)


class CoreClient:
    """Sender of messages to one core, through the core's part of the outbox. While the core is not up, submits, aborts
    and pings are dropped."""

    def __init__(self, hello: Hello | GatewayHello, unsent: list[FrontendToCore]) -> None:
        self._hello, self._unsent = hello, unsent
        self.is_up = False  # set by Cores when the core sends Welcome

    def connect(self) -> None:
        """Queue Hello and mark the core as not up. Called at the start, and if the core does not know this frontend."""
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
