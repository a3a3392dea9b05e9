"""CompletionNotifier: an eventfd that becomes readable when a step ends on the device.

One poll can then wait for messages and for the device without spinning.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from ...ipc.shortages.threads import start_thread


class CompletionNotifier:
    """Owns the eventfd and a thread, started at the first `add`, that waits for one completion after the other."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waits: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, wait: Callable[[], None]) -> None:
        """Notify after `wait` returns or raises. The thread calls the waits in the order of `add`."""
        if self._thread is None:
            self._thread = start_thread("completion-watch", self._run)
        self._waits.put(wait)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next completion; call it before looking for finished steps."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def _run(self) -> None:
        while True:
            wait = self._waits.get()
            with suppress(Exception):  # the reader of the result raises the same error
                wait()
            os.eventfd_write(self.fd, 1)
