"""BlobSender: reads, in a thread, the parts of blobs that cores of engines request from a gateway.

A core requests only a few parts at a time, so that no more than these are in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue

from ....ipc.blobs.channel import BlobServer
from ....ipc.blobs.engine_blobs import EngineBlobs
from ....ipc.errors import Overloaded
from ....ipc.messages.blobs import BlobReply, GetBlob
from ....ipc.shortages.threads import start_thread
from ....ipc.spec.config.engine_spec import EngineSpec


class BlobSender:
    """Owner of the thread, which starts with the first request. The event loop calls all methods."""

    def __init__(self, spec: EngineSpec, wake: Callable[[], None]) -> None:
        """`wake` is called from the thread and must cause a call of `take`."""
        self._spec, self._wake = spec, wake
        self._requests: SimpleQueue[tuple[int, GetBlob]] = SimpleQueue()
        self._replies: SimpleQueue[tuple[int, BlobReply]] = SimpleQueue()
        self._has_thread = False

    def ask(self, core: int, request: GetBlob) -> None:
        """Queue the read of a part of a blob for a core. If no thread can be started, drop the request: the core
        repeats requests that get no reply."""
        if not self._has_thread:
            try:
                start_thread("blobs", self._run)
            except Overloaded:
                return
            self._has_thread = True
        self._requests.put((core, request))

    def take(self) -> list[tuple[int, BlobReply]]:
        """Return the parts that have been read since the last call, each with the number of its core."""
        return [self._replies.get() for _ in range(self._replies.qsize())]

    def _run(self) -> None:
        server = BlobServer(EngineBlobs(self._spec))
        while True:
            core, request = self._requests.get()
            reply = server.reply(request, time.monotonic())
            if reply is not None:
                self._replies.put((core, reply))
                self._wake()
