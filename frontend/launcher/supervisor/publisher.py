"""Publisher: reports of the engine's start and state to its frontends, to the operator and to systemd."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ....ipc.messages import supervisor as messages
from ....ipc.process.log import log_always
from ....ipc.process.service_manager import READY, notify
from ...checkpoint.start_report import StartReport
from .children import Children
from .engine_state import state_lines
from .losses import Losses
from .roster import Roster

logger = logging.getLogger("tokenloom.supervisor")


class Publisher:
    """Sender of the reports. It changes nothing."""

    def __init__(
        self,
        children: Children,
        roster: Roster,
        losses: Losses,
        report: StartReport,
        announce: Callable[[str], None],
        places: Callable[[], Sequence[str]],
    ) -> None:
        """announce: called with each line for the operator. places: returns the addresses at which the engine
        serves."""
        self._children, self._roster, self._losses, self._report = children, roster, losses, report
        self._announce, self._places = announce, places
        self._started_at = time.monotonic()

    def announce_ready(self, model: str) -> None:
        """Announce to the operator and to systemd that the engine serves, and where."""
        places = " and ".join(self._places())
        self._announce(f"Ready at {places} after {time.monotonic() - self._started_at:.2f} s")
        notify(READY, f"serves {model} at {places}")

    def publish_start(self) -> None:
        """Send the phases of the start to the frontends."""
        phases = messages.StartPhases(phases=self._report.phases, kernels=self._children.kernels())
        self._children.broadcast(phases, "frontend")

    def publish_progress(self) -> None:
        """Send the engine's progress and state to the frontends, for /health and metrics."""
        self._children.broadcast(self.progress(), "frontend")

    def progress(self) -> messages.Progress:
        """Return the last Progress of the cores, added up, with the fields that the supervisor knows."""
        return self._losses.add_to(self._roster.progress())

    def log_state(self, phase: str) -> None:
        """Log the engine's state at any log level, since the operator asked for it."""
        places = [] if phase == "starting" else list(self._places())
        uptime_s = time.monotonic() - self._started_at
        for line in state_lines(self._roster.state(places, uptime_s, phase, self.progress())):
            log_always(logger, line)
