"""Losses: the consequences of the loss of a process: which units are replaced, when, and the notices to others.

If a worker is lost, its whole group is replaced; if a core is lost, its tier process, too. Each further loss in a row
delays the next start (RestartPolicy); after too many the unit is given up, rests, or ends the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from ....ipc.errors import EngineDead
from ....ipc.messages import supervisor as messages
from ....ipc.notes.deadly import DeadlyRequests
from ....ipc.sockets.addresses import RunDirectory
from .children import Child, Children
from .frontends.kept_connections import KeptConnections
from .launcher import Unit
from .replica import Replica
from .replicas.restart_policy import MAX_DELAY_S
from .roster import Roster

logger = logging.getLogger("tokenloom.supervisor")

REST_S = 60.0  # before the next start of an optional process, or one of several frontends, that was lost too often


class Losses:
    """Owns the record of losses. `failure` is set if the engine cannot go on."""

    def __init__(
        self,
        run_directory: RunDirectory,
        children: Children,
        roster: Roster,
        kept: KeptConnections,
        on_replica_lost: Callable[[Replica, str, bool], None],
        on_frontend_lost: Callable[[bytes], None],
    ) -> None:
        """on_replica_lost: gets a replica that has lost a process, the reason, and whether its core is still there.
        on_frontend_lost: gets an identity."""
        self._children, self._roster, self._kept = children, roster, kept
        self._on_replica_lost, self._on_frontend_lost = on_replica_lost, on_frontend_lost
        self._deadly = DeadlyRequests(run_directory.path)
        self.rest_s, self.max_delay_s = REST_S, MAX_DELAY_S
        self.last = ""  # reason of the last one
        self.failure: EngineDead | None = None

    def add_to(self, progress: messages.Progress) -> messages.Progress:
        """Return the engine's progress with the last loss, and the HTTP answers that losses interrupted."""
        answers = self._kept.counts()
        return msgspec.structs.replace(
            progress,
            num_http_answers_resumed=answers.num_resumed,
            num_http_answers_cut=answers.num_cut,
            last_failure=self.last,
        )

    def on_loss(self, child: Child, reason: str) -> None:
        """Replace the unit of a process that ended or hangs, and units that need it. After too many losses give up the
        replica, or set `failure`."""
        logger.error("%s", reason)
        self.last = reason
        unit, delay_s = child.spec.unit, self._roster.on_failure(child)
        if unit.role == "frontend":
            self._lose_frontend(child, delay_s, reason)
        elif unit.is_optional:
            self._lose_optional(child, delay_s)
        elif delay_s is None:
            self._give_up(self._roster.replica_of(child), unit, reason)
        else:
            self._lose_vital(child, delay_s, reason)

    def _lose_vital(self, child: Child, delay_s: float, reason: str) -> None:
        """Replace a core or a worker group after `delay_s`."""
        unit, replica = child.spec.unit, self._roster.replica_of(child)
        self.replace(unit, delay_s)
        if unit.role == "worker":
            self._children.send_to(replica.core, messages.WorkersDown(generation=child.spec.number, reason=reason))
            if any(not core.is_ready for core in self._children.of(replica.core)):  # it waits for the old generation
                self.replace(replica.core)
        elif replica.holdings.is_changing:  # some ranks may have read the order, others not
            self.replace(replica.workers)
        self.report(replica, reason)

    def report(self, replica: Replica, reason: str) -> None:
        """Report that a replica has lost a process, or was given up."""
        self.tell(replica, reason, self._roster.frontend_children)
        self._on_replica_lost(replica, reason, self._children.is_up(replica.core))

    def tell(self, replica: Replica, reason: str, frontends: list[Child]) -> None:
        """Send ReplicaDown for a replica that has lost a process, or was given up, to these frontends."""
        has_core = self._children.is_up(replica.core)
        touched = replica.read_touched()
        for frontend in frontends:
            keys = [each.key for each in touched if each.identity == frontend.spec.identity]
            down = messages.ReplicaDown(
                replica=replica.number, reason=reason, has_core=has_core, is_final=not replica.units, touched=keys
            )
            self._children.send(frontend, down)

    def _lose_frontend(self, child: Child, delay_s: float | None, reason: str) -> None:
        """Replace a frontend after `delay_s`. If that is None, wait `rest_s` while another one is up, else
        `max_delay_s`: a frontend that was ready is never given up, since a caller's request may have ended it and no
        caller may end the engine. If it was not ready and no other one is up, end the engine."""
        unit = child.spec.unit
        identity = child.spec.identity
        was_killed = child.process.was_killed
        if delay_s is None:
            has_others = any(self._children.is_up(each) for each in self._roster.frontends if each != unit)
            if not has_others and not child.is_ready:
                self.failure = EngineDead(f"the {unit.name} cannot be kept alive; last: {reason}")
                return
            delay_s = self.rest_s if has_others else self.max_delay_s
            if has_others:
                self._roster.resting.add(unit)
            others = "the others go on without it, and " if has_others else ""
            logger.error("the %s ends again and again: %sit is started again in %.0f s", unit.name, others, delay_s)
        self._replace_frontend(child, delay_s)
        self._deadly.on_loss(identity.decode(), is_to_blame=not was_killed)

    def hand_over(self, child: Child) -> None:
        """Replace a frontend that has ended for its successor."""
        self._replace_frontend(child, 0.0)

    def _replace_frontend(self, child: Child, delay_s: float) -> None:
        self._kept.withhold(child.spec.unit.place)
        self.replace(child.spec.unit, delay_s)
        self._children.broadcast(messages.FrontendDown(identity=child.spec.identity), "core")
        self._on_frontend_lost(child.spec.identity)

    def _give_up(self, replica: Replica, unit: Unit, reason: str) -> None:
        """Give up a replica with a unit that cannot be kept alive; the engine ends with its last replica."""
        if len(self._roster.alive) == 1:
            self.failure = EngineDead(f"the {unit.name} cannot be kept alive; last: {reason}")
            return
        self._roster.give_up(replica)
        text = "the %s cannot be kept alive and its replica is taken off: %d of %d go on; last: %s"
        logger.error(text, unit.name, len(self._roster.alive), len(self._roster.replicas), reason)
        self.report(replica, reason)

    def _lose_optional(self, child: Child, delay_s: float | None) -> None:
        """Replace the tier or launcher process after `delay_s`, or after `rest_s` if that is None. Send TierDown to the
        core if it is the tier process."""
        unit = child.spec.unit
        replica = self._roster.replica_of(child)
        if delay_s is None:
            text = "the %s process ends again and again: the engine goes on without it and starts it again in %.0f s"
            logger.error(text, child.spec.name, self.rest_s)
        self.replace(unit, self.rest_s if delay_s is None else delay_s)
        if unit == replica.tier:
            replica.on_tier_lost()
            self._children.send_to(replica.core, messages.TierDown(number=child.spec.number))

    def replace(self, unit: Unit, delay_s: float = 0.0) -> None:
        """Kill the processes of a unit; their successors start after `delay_s`. A tier process ends before its core,
        whose successor hands out the same slots."""
        if unit.role == "core":
            replica = self._roster.replicas[unit.place]
            replica.on_core_lost()
            if replica.tier in replica.units:
                self.replace(replica.tier)
        self._roster.replace(unit, delay_s)
