"""CoreClient: the frontend's messages to the core, and whether it is connected. FrontendOutbox: all unsent messages.

A core that is new, or has forgotten this frontend, needs a Hello and then all open requests. Until its Welcome only
Hello and control commands are sent. Knows no client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ipc.config.engine_spec import EngineSpec
from ...ipc.messages.base import PING_INTERVAL_S, Ping
from ...ipc.messages.core import AbortRequests, EngineControl, EngineCoreRequest, FrontendToCore
from ...ipc.messages.supervisor import SetLogLevel


@dataclass
class FrontendOutbox:
    """Messages that the frontend wants sent. The owner of its sockets empties it after each turn, clients first:
    a send to a client that is gone adds aborts for the core."""

    to_clients: list[tuple[bytes, bytes]] = field(default_factory=list)  # identity, frame
    to_core: list[FrontendToCore] = field(default_factory=list)
    to_supervisor: list[SetLogLevel] = field(default_factory=list)


class CoreClient:
    """Messages to the core, put into the outbox. While the core is not up, submits, aborts and pings are dropped."""

    def __init__(self, spec: EngineSpec, outbox: FrontendOutbox) -> None:
        self._hello = spec.hello
        self._outbox = outbox
        self.is_up = False  # Frontend sets it on Welcome
        self.next_ping_at = 0.0  # monotonic seconds

    def connect(self) -> None:
        """Queue Hello, and count the core as not up: at the start, or if the core does not know this frontend."""
        self.is_up = False
        self._outbox.to_core.append(self._hello)

    def submit(self, request: EngineCoreRequest) -> None:
        if self.is_up:
            self._outbox.to_core.append(request)

    def abort(self, keys: list[int]) -> None:
        if keys and self.is_up:
            self._outbox.to_core.append(AbortRequests(keys=keys))

    def control(self, command: EngineControl) -> None:
        self._outbox.to_core.append(command)

    def keep_alive(self, now: float) -> None:
        """Queue a ping if the core is up, and set `next_ping_at`. A core that does not know this frontend replies
        Unknown. Call it at `next_ping_at`, while the core has requests of this frontend."""
        if self.is_up:
            self.next_ping_at = now + PING_INTERVAL_S
            self._outbox.to_core.append(Ping())
