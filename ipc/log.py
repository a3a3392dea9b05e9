"""One line per event on stderr: time, level, process, text. Never a prompt.

Each process calls `configure` once with its name; everything else uses logging.getLogger("tokenloom…").
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("tokenloom")


def is_worth_a_line(count: int) -> bool:
    """Whether to log the `count`-th event of a kind: the 1st, 2nd, 4th, 8th …, so that no flood fills a disk."""
    return count & (count - 1) == 0


def configure(process: str, level: str = "info") -> None:
    """Send this process's records to stderr, marked with `process` (core, frontend, worker 0 …)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
