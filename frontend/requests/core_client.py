"""CoreClient: what the frontend says to the core, and whether the core knows it. Its Outbox is for all that is sent.

Knows no client. A core that is new, or has forgotten this frontend, must be greeted and told everything again; until it
says Welcome nothing else is said to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ipc.config.engine_spec import EngineSpec
from ...ipc.messages.base import PING_INTERVAL_S, Ping
from ...ipc.messages.core import AbortRequests, EngineControl, EngineCoreRequest, FrontendToCore
from ...ipc.messages.supervisor import SetLogLevel


@dataclass
class Outbox:
    """What the frontend has to send, for whoever owns its sockets. Emptied after each turn: clients first, since one
    that turns out to be gone leaves requests to abort."""

    to_clients: list[tuple[bytes, bytes]] = field(default_factory=list)  # identity, frame
    to_core: list[FrontendToCore] = field(default_factory=list)
    to_supervisor: list[SetLogLevel] = field(default_factory=list)


class CoreClient:
    """Its messages wait in the outbox."""

    def __init__(self, spec: EngineSpec, outbox: Outbox) -> None:
        self._hello = spec.hello
        self._outbox = outbox
        self.is_up = False  # set by whoever hears the Welcome
        self.next_ping_at = 0.0  # monotonic seconds

    def connect(self) -> None:
        """Say Hello: at the start, and to a core that does not know us."""
        self.is_up = False
        self._outbox.to_core.append(self._hello)

    def submit(self, request: EngineCoreRequest) -> None:
        if self.is_up:
            self._outbox.to_core.append(request)

    def abort(self, keys: list[int]) -> None:
        if keys and self.is_up:
            self._outbox.to_core.append(AbortRequests(keys=keys))

    def control(self, order: EngineControl) -> None:
        self._outbox.to_core.append(order)

    def keep_alive(self, now: float) -> None:
        """To be called in each turn in which the core has requests of ours."""
        if self.is_up and now >= self.next_ping_at:
            self.next_ping_at = now + PING_INTERVAL_S
            self._outbox.to_core.append(Ping())
