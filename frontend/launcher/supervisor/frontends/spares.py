"""SpareFrontends: frontends that load while another one serves, to take its place.

A spare has the number of the next frontend of its unit and the descriptors that it will need. It imports and loads all
that it can without them, reports Loaded, and waits for TakeOver. Until then it gets no other message and is no part of
the engine: if it ends, nothing is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .....ipc.messages.base import Hello
from .....ipc.messages.supervisor import ChildToSupervisor, Failed, Loaded, TakeOver
from .....ipc.spec.config.engine_spec import EngineSpec
from ..children import Child, Children
from ..launcher import ProcessSpec, Unit
from ..roster import Roster
from .kept_connections import KeptConnections

logger = logging.getLogger("tokenloom.supervisor")

REST_S = 60.0  # before the next attempt to keep a spare


class SpareFrontends:
    """Owner of the spares, at most one of each frontend."""

    def __init__(
        self,
        spec: EngineSpec,
        children: Children,
        roster: Roster,
        kept: KeptConnections,
        new_spec: Callable[[Unit, int], ProcessSpec],
    ) -> None:
        """new_spec: describes the spare of a unit with this number."""
        self._spec = spec
        self._children = children
        self._roster = roster
        self._kept = kept
        self._new_spec = new_spec
        self._rests_until = 0.0  # monotonic seconds

    def of(self, unit: Unit) -> Child | None:
        """Return the spare of a frontend, if it has one."""
        return next((child for child in self._children.spares if child.spec.unit == unit), None)

    def start(self, unit: Unit) -> Child:
        """Start a spare for a frontend that serves."""
        logger.info("the next %s loads", unit.name)
        return self._children.spawn_spare(self._new_spec(unit, self._roster.numbers[unit] + 1))

    def keep(self) -> None:
        """With --spare-frontend, start a spare for each frontend that serves and has none. After the loss of a spare
        none is started for REST_S."""
        if not self._spec.config.spare_frontend or time.monotonic() < self._rests_until:
            return
        for unit in self._roster.frontends:
            if self._children.is_up(unit) and self.of(unit) is None:
                self.start(unit)

    def take_message(self, child: Child, message: ChildToSupervisor) -> bool:
        """Handle a message of a spare. Return False for other messages."""
        is_spare = child in self._children.spares
        if isinstance(message, Loaded):
            child.is_loaded = True
            if not is_spare:  # it was needed before it had loaded
                self._order(child)
            return True
        if is_spare and isinstance(message, Hello):
            child.failure = self._spec.mismatch(message)
        elif is_spare and isinstance(message, Failed):
            child.failure = message.error.message
        return is_spare

    def take_over(self, unit: Unit) -> bool:
        """Let the spare of a frontend that has ended take its place. Return False if there is none that can."""
        spare = self.of(unit)
        if spare is None:
            return False
        if spare.process.has_ended or spare.failure or spare.spec.number != self._roster.numbers[unit]:
            self.discard(spare)
            return False
        self._kept.hand_over(unit.place)
        self._children.add_spare(spare)
        spare.started_at = spare.last_sign_at = time.monotonic()
        if spare.is_loaded:
            self._order(spare)
        return True

    def _order(self, spare: Child) -> None:
        """Send TakeOver to a process that has loaded, and the messages that it needs: before, it may not be connected,
        and drops them."""
        self._children.send(spare, TakeOver())
        self._children.send_kept(spare)

    def discard(self, *spares: Child) -> None:
        """End these spares."""
        for spare in spares:
            self._children.remove_spare(spare)

    def take_lost(self) -> list[tuple[Unit, str]]:
        """End the spares that have failed, and return their units with the reasons."""
        lost: list[tuple[Unit, str]] = []
        for spare in list(self._children.spares):
            if spare.process.has_ended:
                for each, message in self._children.receive_last_of(spare):
                    if each is spare:
                        self.take_message(each, message)
            if spare.process.has_ended or spare.failure:
                lost.append((spare.spec.unit, spare.describe_end()))
                logger.warning("the next %s has not come up: %s", spare.spec.unit.name, spare.describe_end())
                self._rests_until = time.monotonic() + REST_S
                self.discard(spare)
        return lost
