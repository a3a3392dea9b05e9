"""Outbox: what the frontend has to send, for whoever owns its sockets."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ipc.messages import FrontendToCore


@dataclass
class Outbox:
    """Emptied after each turn: clients first, since one that turns out to be gone leaves requests to abort."""

    to_clients: list[tuple[bytes, bytes]] = field(default_factory=list)  # identity, frame
    to_core: list[FrontendToCore] = field(default_factory=list)
