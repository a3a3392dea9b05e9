"""FrontendReload: replaces the frontends one by one on SIGUSR2, as after a change of their program, and cuts no stream.

A frontend ends between two turns, so that nothing is half done, and its successor goes on as after a loss. The next one
follows when it serves.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from ....ipc.messages.supervisor import HandOver
from .children import Child, Children
from .launcher import Unit
from .roster import Roster

logger = logging.getLogger("tokenloom.supervisor")


class FrontendReload:
    """Owner of the list of frontends that are to be replaced; the first one ends or starts."""

    def __init__(self, children: Children, roster: Roster, hand_over: Callable[[Child], None]) -> None:
        """hand_over: called with a frontend that has ended for its successor."""
        self._children, self._roster, self._hand_over = children, roster, hand_over
        self._left: deque[Unit] = deque()
        self._asked: Child | None = None  # the process that is to end

    def begin(self) -> None:
        """Replace all frontends, unless that is going on."""
        if not self._left:
            self._left.extend(self._roster.frontends)
            logger.info("%d frontends are replaced, one by one", len(self._left))

    def go_on(self) -> None:
        """Ask the next frontend to end if the one before serves. Call it once a turn."""
        while self._left:
            unit = self._left[0]
            if not self._children.is_up(unit):
                return
            (child,) = self._children.of(unit)
            if self._asked is None:
                self._asked = child
                self._children.send(child, HandOver())
                return
            if child is self._asked:
                return
            self._asked = None
            self._left.popleft()

    def take_end(self, child: Child) -> bool:
        """Return whether a process has ended because it was asked to; its successor is started then."""
        if child is not self._asked or child.process.was_killed or child.failure:
            return False
        self._hand_over(child)
        return True
