"""One line per event on stderr: time, level, process, text. Never a prompt.

Each process calls `configure` once with its name; everything else uses logging.getLogger("tokenloom…").
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("tokenloom")


def configure(process: str, level: str = "info") -> None:
    """Send this process's records to stderr, marked with `process` (core, frontend, worker 0 …)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
