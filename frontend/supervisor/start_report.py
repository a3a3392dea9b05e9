"""How a start is told: each line in the form of a log line.

The command prints all of it on its standard output. A program that has started an engine (LLM) sees nothing if the
start is quick, else a line now and then on its standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

from ...ipc.messages.supervisor import PhaseProgress
from ...ipc.process import log
from ...ipc.process.awake_clock import AwakeClock

SILENCE_S = 5.0  # of a start that takes long at the same thing
PATIENCE_S = 3.0  # of somebody who looks at a program that says nothing


class StartReport:
    """What the supervisor tells of a start, and how long ago it told something last."""

    def __init__(self, announce: Callable[[str], None], clock: AwakeClock) -> None:
        self._announce, self._clock = announce, clock
        self._told_at = clock.now

    def tell(self, process: str, news: str) -> None:
        self._told_at = self._clock.now
        self._announce(log.info_line(process, news))

    def tell_progress(self, process: str, progress: PhaseProgress) -> None:
        share = progress.num_done / max(progress.num_all, 1)
        self.tell(process, f"{progress.name}: {share:.0%}, {progress.num_done} of {progress.num_all} {progress.unit}")

    def tell_late(self, names: Iterable[str]) -> None:
        """Which processes are still starting, if nothing was told for SILENCE_S."""
        if self._clock.now - self._told_at >= SILENCE_S:
            self.tell("supervisor", f"still starting: {', '.join(names)}")


class PatientReport:
    """Passes on a line if none was for PATIENCE_S, and drops the others."""

    def __init__(self, write: Callable[[str], None], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._write, self._monotonic = write, monotonic
        self._shown_at = monotonic()

    def __call__(self, line: str) -> None:
        now = self._monotonic()
        if now - self._shown_at >= PATIENCE_S:
            self._shown_at = now
            self._write(line)


def write_to_stderr(line: str) -> None:
    log.write_line(line, sys.stderr)
