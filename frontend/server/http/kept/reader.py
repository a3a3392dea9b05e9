"""JournalReader: a connection's protocol for the event loop, by which the kernel reads bytes straight into the journal.

So there is no moment at which bytes were read and exist in this process alone: if it is killed before the journal's
record counts them, its successor finds them by the kernel's count (Slot.take_read).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .....ipc.process.faults import maybe_fail


class JournalReader(asyncio.BufferedProtocol):
    """Protocol around another one, which gets the bytes once they are read."""

    def __init__(self, protocol: asyncio.Protocol, room: Callable[[], memoryview]) -> None:
        """`room`: returns the memory for the next bytes."""
        self._protocol, self._room = protocol, room
        self.connection_made = protocol.connection_made  # type: ignore[method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        self._buffer = self._room()
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        maybe_fail("http.read")
        self._protocol.data_received(bytes(self._buffer[:nbytes]))
