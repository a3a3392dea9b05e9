"""One line per event on stderr: time, level, process, text. Never a prompt.

Each process calls `configure` once with its name; everything else uses logging.getLogger("tokenloom…").
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time
from typing import Literal, TextIO, TypeAlias

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

logger = logging.getLogger("tokenloom")

_TIME_FORMAT = "%H:%M:%S"


def is_worth_a_line(count: int) -> bool:
    """Whether to log the `count`-th event of a kind: the 1st, 2nd, 4th, 8th …, so that no flood fills a disk."""
    return count & (count - 1) == 0


def write_line(line: str, stream: TextIO | None) -> None:
    """Write a line at once, or not at all: a full disk, a reader that is gone or stopped (Ctrl-S in a terminal) costs
    the line and must not hold up a process."""
    if stream is None:
        return
    try:
        fd = stream.fileno()
    except OSError:  # it is in memory
        stream.write(f"{line}\n")
        return
    except ValueError:  # it is closed
        return
    with contextlib.suppress(OSError):
        if select.select([], [fd], [], 0)[1]:
            os.write(fd, f"{line}\n".encode(errors="replace"))


def info_line(process: str, message: str) -> str:
    """A line in the form of the log, for what is printed elsewhere."""
    return f"{time.strftime(_TIME_FORMAT)} INFO {process}: {message}"


def log_always(logger: logging.Logger, message: str) -> None:
    """Log a line at INFO whatever the least level is."""
    logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, message, (), None))


class _LineHandler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        write_line(self.format(record), self.stream)


def configure(process: str, level: str = "info") -> None:
    """Send this process's records to stderr, marked with `process` (core, frontend, worker 0 …)."""
    handler = _LineHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", _TIME_FORMAT))
    logger.handlers[:] = [handler]
    set_level(level)
    logger.propagate = False


def set_level(level: str) -> None:
    """Log what is at least this bad from now on."""
    logger.setLevel(level.upper())
