"""FrontendReload: replaces the frontends one by one, as after a change of their program, and cuts no stream.

The next frontend loads while the old one serves (spares.py). Then the old one ends between two turns, so that nothing
is half done, and the next one goes on as after a loss. If it does not load, the old one stays. The next pair follows
when it serves.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from .....ipc.messages.supervisor import HandOver
from ..children import Child, Children
from ..launcher import Unit
from ..roster import Roster
from .spares import SpareFrontends

logger = logging.getLogger("tokenloom.supervisor")


class FrontendReload:
    """Owner of the list of frontends that are to be replaced; the first one serves, ends or starts."""

    def __init__(
        self,
        children: Children,
        roster: Roster,
        spares: SpareFrontends,
        limit_s: float,
        hand_over: Callable[[Child], None],
    ) -> None:
        """limit_s: for the next frontend to load. hand_over: called with a frontend that has ended for its
        successor."""
        self._children, self._roster, self._spares, self._limit_s = children, roster, spares, limit_s
        self._hand_over = hand_over
        self._on_end: list[Callable[[str], None]] = []
        self._left: deque[Unit] = deque()
        self._asked: Child | None = None  # the process that is to end, or has ended, for its successor

    def begin(self, on_end: Callable[[str], None] | None = None) -> None:
        """Replace all frontends, unless that is going on. on_end: called at the end with the reason why not all were
        replaced, or with ""."""
        if on_end is not None:
            self._on_end.append(on_end)
        if not self._left:
            self._left.extend(self._roster.frontends)
            self._spares.discard(*self._children.spares)  # they may be of the program before
            logger.info("%d frontends are replaced, one by one", len(self._left))

    def go_on(self) -> None:
        """Ask the next frontend to end if the one before serves and its successor has loaded. Call it once a turn."""
        while self._left and self._children.is_up(self._left[0]):
            (child,) = self._children.of(self._left[0])
            if self._asked is None:
                self._prepare(child)
                return
            if child is self._asked:
                return
            self._asked = None
            self._left.popleft()
            if not self._left:
                logger.info("%d frontends were replaced", len(self._roster.frontends))
                self._end("")

    def _prepare(self, child: Child) -> None:
        """Let the successor of a frontend load, and then ask the frontend to end."""
        spare = self._spares.of(child.spec.unit) or self._spares.start(child.spec.unit)
        if spare.is_loaded:
            self._asked = child
            self._children.send(child, HandOver())
        elif time.monotonic() > spare.started_at + self._limit_s:
            self._spares.discard(spare)
            self.on_lost(child.spec.unit, f"it has not loaded within --start-timeout-s {self._limit_s:g} s")

    def take_end(self, child: Child) -> bool:
        """Return whether a process has ended because it was asked to; its successor takes over then."""
        if child is not self._asked or child.process.was_killed or child.failure:
            return False
        self._hand_over(child)
        return True

    def on_loss(self, child: Child, reason: str) -> None:
        """End with an error if a process was lost that has taken over."""
        if self._asked is not None and child is not self._asked:
            self.on_lost(child.spec.unit, reason)

    def on_lost(self, unit: Unit, reason: str) -> None:
        """End with an error if it was the successor of the frontend that is being replaced now."""
        if not self._left or self._left[0] != unit:
            return
        num_all = len(self._roster.frontends)
        num_replaced = num_all - len(self._left)
        serves = "another one is started" if self._asked else "the one before goes on"
        self._left.clear()
        self._asked = None
        failure = f"the next {unit.name} has not come up, {serves}; {num_replaced} of {num_all} were replaced: {reason}"
        logger.error("%s", failure)
        self._end(failure)

    def _end(self, failure: str) -> None:
        while self._on_end:
            self._on_end.pop()(failure)
