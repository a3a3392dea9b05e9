"""How a start is told: each line in the form of a log line.

The command prints all of it on its standard output. A program that has started an engine (LLM) sees nothing if the
start is quick, else a line now and then on its standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ..ipc import log

PATIENCE_S = 3.0  # of somebody who looks at a program that says nothing


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
