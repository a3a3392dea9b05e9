"""Logging: one line per event on stderr with time, level, process and text; never a prompt or a password.

Each process calls `configure` once with its name; modules use logging.getLogger("tokenloom…").
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time
from typing import Literal, TextIO, TypeAlias

from ..errors import hide_credentials

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

logger = logging.getLogger("tokenloom")

_TIME_FORMAT = "%H:%M:%S"


def is_worth_a_line(count: int) -> bool:
    """Return whether to log the `count`-th event of a kind: only the 1st, 2nd, 4th, 8th …, to limit floods."""
    return count & (count - 1) == 0


def write_line(line: str, stream: TextIO | None) -> None:
    """Write a line without blocking; drop it if the disk is full or the reader is gone or stopped (Ctrl-S)."""
    if stream is None:
        return
    try:
        fd = stream.fileno()
    except OSError:  # a stream in memory
        stream.write(f"{line}\n")
        return
    except ValueError:  # a closed stream
        return
    with contextlib.suppress(OSError):
        if select.select([], [fd], [], 0)[1]:
            os.write(fd, f"{line}\n".encode(errors="replace"))


def info_line(process: str, message: str) -> str:
    """Return a message as a line in the log's format, to be written elsewhere than to the log."""
    return f"{time.strftime(_TIME_FORMAT)} INFO {process}: {message}"


def log_always(logger: logging.Logger, message: str) -> None:
    """Log a line as INFO, whatever the log level is."""
    logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, message, (), None))


class _LineHandler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        write_line(hide_credentials(self.format(record)), self.stream)


def configure(process: str, level: str = "info") -> None:
    """Write this process's log to stderr, from `level` up; each line has `process` (core, frontend, worker 0 …)."""
    handler = _LineHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", _TIME_FORMAT))
    logger.handlers[:] = [handler]
    set_level(level)
    logger.propagate = False


def set_level(level: str) -> None:
    """Set the lowest level that is logged."""
    logger.setLevel(level.upper())
