"""CompletionNotifier: an eventfd that becomes readable when a step ends on the device.

So one poll can wait for messages and for the device, without spinning.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from ...ipc.shortages.threads import start_thread


class CompletionNotifier:
    """Owner of the eventfd and of a thread, started by the first `add`, that waits for one completion after another."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waits: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, wait: Callable[[], None]) -> None:
        """Make the descriptor readable once `wait` has returned or raised. The thread calls all waits in the order in
        which they were added."""
        if self._thread is None:
            self._thread = start_thread("completion-watch", self._run)
        self._waits.put(wait)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next completion. Call this before looking for finished steps."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def _run(self) -> None:
        while True:
            wait = self._waits.get()
            with suppress(Exception):  # the reader of the result raises the same error
                wait()
            os.eventfd_write(self.fd, 1)
