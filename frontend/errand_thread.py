"""ErrandThread: runs callers' own functions, one after the other, outside the thread of the socket.

A caller's callback may be slow, or may wait for the very client that calls it; pings must go on meanwhile. The thread
starts with the first errand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class ErrandThread:
    """`run` from any thread; after `stop` the errands that are queued are still run, new ones at once by the caller."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._errands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None  # once there was an errand
        self._is_stopped = False

    def run(self, errand: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_stopped:
                self._errands.put(errand)
                if self.thread is None:
                    self.thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self.thread.start()
                return
        errand()

    def stop(self) -> None:
        """The thread ends when what is queued is done."""
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                self._errands.put(None)

    def _work(self) -> None:
        while True:
            errand = self._errands.get()
            if errand is None:
                return
            errand()
