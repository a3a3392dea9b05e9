"""RollingRestart: restarts replicas one after the other without losing an answer.

A replica drains first: frontends send it nothing new, and after --drain-timeout-s its open answers move to other
replicas with their tokens. When all frontends have reported it drained, its processes are replaced; the next replica
follows when they serve. If a frontend is lost in between, its successor gets the order to drain, too; a lost process of
a replica is replaced as at any other time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from ....ipc.messages.supervisor import DrainReplica, ReplicaDrained
from ....ipc.spec.config.engine_spec import EngineSpec
from .children import Child, Children
from .launcher import Unit
from .replica import Replica
from .roster import Roster

logger = logging.getLogger("tokenloom.supervisor")


class RollingRestart:
    """Owner of the list of replicas that are to be restarted. At most one drains or starts at a time."""

    def __init__(
        self,
        spec: EngineSpec,
        roster: Roster,
        children: Children,
        replace: Callable[[Unit], None],
        report_loss: Callable[[Replica, str], None],
        on_end: Callable[[str], None],
    ) -> None:
        """replace: ends the processes of a unit, and has their successors started. report_loss: called after the
        processes of a replica were replaced. on_end: called at the end with the reason why replicas were not restarted,
        or with ""."""
        self._drain_s = spec.config.drain_timeout_s
        self._roster, self._children, self._replace, self._report_loss = roster, children, replace, report_loss
        self._on_end = on_end
        self._left: deque[Replica] = deque()  # the first of these drains or starts
        self._drains: set[bytes] | None = None  # frontends that have not reported it drained; None: it waits or starts
        self._waits = False  # it does not drain before another replica serves

    def begin(self, number: int | None) -> None:
        """Restart the replica `number`, or all if None. The previous restart must have ended."""
        alive = self._roster.alive
        self._left = deque(each for each in alive if number in (None, each.number))
        if len(alive) == 1:
            self._end("one replica serves, and another must answer meanwhile: raise --data-parallel-size")
        elif not self._left:
            self._end(f"there is no replica {number}: replicas {', '.join(str(each.number) for each in alive)} run")
        else:
            self._begin_replica()

    def _begin_replica(self) -> None:
        """Let the next replica drain once another one can take its answers."""
        replica = self._left[0]
        others = [other for other in self._roster.alive if other is not replica]
        self._waits = not any(map(self._roster.is_up, others))
        if self._waits:
            obstacles = [self._children.obstacle(other.workers) for other in others]
            if all(obstacles):
                reason = "".join(f": {each}" for each in obstacles[:1])
                self._end(f"no other replica serves, which replica {replica.number} needs{reason}")
            else:
                logger.info("replica %d drains as soon as another one serves", replica.number)
            return
        logger.info("replica %d drains, at most %g s, to be restarted", replica.number, self._drain_s)
        frontends = self._roster.frontend_children
        self._drains = {child.spec.identity for child in frontends}
        for child in frontends:
            self._tell(child)
        self._go_on_if_drained()

    def _tell(self, frontend: Child) -> None:
        self._children.send(frontend, DrainReplica(replica=self._left[0].number, limit_s=self._drain_s))

    def on_frontend_ready(self, frontend: Child) -> None:
        """Send a new frontend the order to drain the replica that drains now, if any."""
        if self._drains is not None:
            self._drains.add(frontend.spec.identity)
            self._tell(frontend)

    def on_replica_drained(self, frontend: Child, message: ReplicaDrained) -> None:
        if self._left and message.replica == self._left[0].number:
            self.on_drained(frontend.spec.identity)

    def on_drained(self, frontend: bytes) -> None:
        """Record that a frontend has no more answers at the replica that drains, or is lost."""
        if self._drains is not None:
            self._drains.discard(frontend)
            self._go_on_if_drained()

    def _go_on_if_drained(self) -> None:
        if self._drains is not None and not self._drains:
            self._drains, replica = None, self._left[0]
            logger.info("replica %d has drained and starts again", replica.number)
            self._replace(replica.core)
            self._replace(replica.workers)
            self._report_loss(replica, f"replica {replica.number} is being restarted")

    def on_changed(self) -> None:
        """Continue after a unit has come up or a replica was given up: start the next replica's restart, or end."""
        if not self._left or self._drains is not None:
            return
        replica = self._left[0]
        if not replica.units:
            self._end(f"replica {replica.number} could not be started again")
        elif self._waits:
            self._begin_replica()
        elif self._roster.is_up(replica):
            self._left.popleft()
            if self._left:
                self._begin_replica()
            else:
                self._end()

    def _end(self, failure: str = "") -> None:
        self._left.clear()
        self._drains = None
        self._on_end(failure)
