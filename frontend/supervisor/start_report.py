"""Reports the progress of a start as log lines.

The command prints all of them on its standard output. A program that starts an engine (LLM) prints at most one every
MIN_INTERVAL_S on its standard error, hence none for a quick start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

from ...ipc.messages.supervisor import PhaseProgress
from ...ipc.process import log
from ...ipc.process.awake_clock import AwakeClock

SILENCE_S = 5.0  # without a line, after which the unfinished processes are named
MIN_INTERVAL_S = 3.0  # between two lines of a ThrottledWriter


class StartReport:
    """Writer of the lines of a start, through `announce`."""

    def __init__(self, announce: Callable[[str], None], clock: AwakeClock) -> None:
        self._announce, self._clock = announce, clock
        self._announced_at = clock.now

    def announce(self, process: str, text: str) -> None:
        self._announced_at = self._clock.now
        self._announce(log.info_line(process, text))

    def announce_progress(self, process: str, progress: PhaseProgress) -> None:
        share, done = progress.num_done / max(progress.num_all, 1), f"{progress.num_done} of {progress.num_all}"
        self.announce(process, f"{progress.name}: {share:.0%}, {done} {progress.unit}")

    def announce_late(self, names: Iterable[str]) -> None:
        """Announce the processes `names` as still starting, if there was no line for SILENCE_S."""
        if self._clock.now - self._announced_at >= SILENCE_S:
            self.announce("supervisor", f"still starting: {', '.join(names)}")


class ThrottledWriter:
    """Writer of lines that drops a line within MIN_INTERVAL_S of the last written one, or of its own creation."""

    def __init__(self, write: Callable[[str], None], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._write, self._monotonic = write, monotonic
        self._shown_at = monotonic()

    def __call__(self, line: str) -> None:
        now = self._monotonic()
        if now - self._shown_at >= MIN_INTERVAL_S:
            self._shown_at = now
            self._write(line)


def write_to_stderr(line: str) -> None:
    log.write_line(line, sys.stderr)
