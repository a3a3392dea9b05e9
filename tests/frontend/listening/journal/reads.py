"""Bytes of requests for slots, without a kernel that reads them."""

from __future__ import annotations

from tokenloom.frontend.listening.journal.slot import Slot


def place(slot: Slot, data: bytes, num_pending: int = 0) -> int:
    """Put as many of these bytes as one read brings where the kernel would, and return their number."""
    room = slot.room(num_pending)
    size = min(len(room), len(data))
    room[:size] = data[:size]
    return size


def read(slot: Slot, data: bytes, num_pending: int = 0) -> None:
    """Let a slot have bytes that were read."""
    while data:
        size = place(slot, data, num_pending)
        slot.put_in(size, num_pending)
        data = data[size:]
