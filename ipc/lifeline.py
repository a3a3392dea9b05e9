"""How a child dies with its parent: a pipe whose write end only the parent holds.

A thread blocks on the read end; the kernel closes the write end when the parent ends, however it ends. The thread
never wakes otherwise.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

PARENT_IS_GONE = 113  # the exit code, for whoever still looks


def start_lifeline(fd: int, before_exit: Callable[[], None] | None = None) -> None:
    """Exit this process when `fd` reports end of file, after `before_exit`, which must be quick and thread-safe."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 1):
                pass
        try:
            if before_exit is not None:
                before_exit()
        finally:
            os._exit(PARENT_IS_GONE)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
