"""KeptTransport: a connection's transport, which puts each piece of an answer into the journal before it is written.

An answer's head waits for the first piece of its body, so that they are one record and one write. If the head was
written by a lost frontend, it is swallowed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from .....ipc.process.faults import HAS_FAULTS, maybe_fail
from ....listening.journal.record import State
from ....listening.journal.slot import Shown, Slot


class KeptTransport:
    """The transport that uvicorn writes to. `expect_head` and `expect_piece` say what the next write is."""

    def __init__(self, transport: asyncio.Transport, slot: Slot) -> None:
        self._transport, self._slot = transport, slot
        self._head = b""  # waits for its piece
        self._expects_head = self._is_muted = False
        self._shown: Shown | None = None
        self._end: State | None = None
        self.is_closing = transport.is_closing
        self.get_write_buffer_size = transport.get_write_buffer_size
        self._put_next, self._write = slot.put_next, transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def expect_head(self, *, is_muted: bool) -> None:
        """The next write is an answer's head. `is_muted`: the client has it."""
        self._expects_head, self._is_muted = True, is_muted

    def expect_piece(self, shown: Shown | None, end: State | None) -> None:
        """The next write shows these tokens. `end`: state of the connection after it, for an answer's last piece."""
        self._shown, self._end = shown, end

    def write(self, data: bytes) -> None:
        if not self._expects_head:
            shown, end = self._shown, self._end
            self._shown = self._end = None
            self.write_piece(data, shown, end)
            return
        self._expects_head = False
        if not self._is_muted:
            self._head = data

    def write_piece(self, data: bytes, shown: Shown | None, end: State | None = None) -> None:
        """Write a piece, behind the head if that still waits. Arguments as of `expect_piece`."""
        if HAS_FAULTS:
            maybe_fail("http.journal")
        head, num_pending = self._head, self.get_write_buffer_size()
        if head or end is not None or num_pending or not self._put_next(data, shown):
            self._head, data = b"", head + data
            self._slot.put_out(data, num_pending, shown, end, is_head=bool(head))
        if HAS_FAULTS:
            maybe_fail("http.write")
        if data:
            self._write(data)
            if HAS_FAULTS:
                maybe_fail("http.written")

    def flush(self) -> None:
        """Write a head that has no body, and end an answer that had nothing to write."""
        if (self._head or self._end is not None) and not self.is_closing():
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()
