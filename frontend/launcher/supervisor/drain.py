"""DrainWatch: asks the frontends to finish their open requests, and detects when all have finished."""

from __future__ import annotations

import time

from ....ipc.messages.base import LEASE_S
from ....ipc.messages.supervisor import Drain
from .children import Child, Children
from .roster import Roster


class DrainWatch:
    """State of the drain that precedes the engine's end. `is_on`: whether the frontends refuse new requests."""

    def __init__(self, children: Children, roster: Roster) -> None:
        self._children, self._roster = children, roster
        self.is_on = False
        self._drained: set[bytes] = set()  # identities of the frontends that have finished
        self._clients_back_at = -LEASE_S  # until then a lost frontend's clients may return; monotonic seconds

    def begin(self) -> None:
        self.is_on = True
        for unit in self._roster.resting:
            self._roster.start_at.pop(unit, None)
        self._ask()

    def on_drained(self, frontend: Child) -> None:
        self._drained.add(frontend.spec.identity)

    def on_frontend_lost_or_back(self) -> None:
        """Let all frontends wait for the clients of a lost frontend, which submit again to another one or to its
        successor."""
        self._clients_back_at = time.monotonic() + LEASE_S
        if self.is_on:
            self._ask()

    @property
    def is_over(self) -> bool:
        """Whether all frontends have finished, except those whose restart waits: their clients are at the others."""
        children = self._roster.frontend_children
        is_complete = len(children) + len(self._roster.resting) == len(self._roster.frontends)
        return is_complete and all(child.spec.identity in self._drained for child in children)

    def _ask(self) -> None:
        self._drained.clear()
        returns_s = max(self._clients_back_at - time.monotonic(), 0.0)
        for child in self._roster.frontend_children:
            if child.is_ready:
                self._children.send(child, Drain(clients_return_s=returns_s))
