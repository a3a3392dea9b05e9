"""CompletionNotifier: a file descriptor that becomes readable when something a thread waited for is over.

So that one poll waits for messages and for a device at once, and nothing spins.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue


class CompletionNotifier:
    """Owns an eventfd, and the thread that waits from the first `add` on."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waits: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, wait: Callable[[], None]) -> None:
        """Call `wait`, which returns when something is over or has failed, after all that were added before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="completion-watch", daemon=True)
            self._thread.start()
        self._waits.put(wait)

    def clear(self) -> None:
        """Before looking at what is over: what ends from now on makes the descriptor readable again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def _run(self) -> None:
        while True:
            wait = self._waits.get()
            with suppress(Exception):  # who looks at what is over will meet the error itself
                wait()
            os.eventfd_write(self.fd, 1)
