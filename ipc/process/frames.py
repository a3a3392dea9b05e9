"""Frames on a stream socket between a process and its child: 8 bytes with the length, then that many bytes.

All calls block. They raise ConnectionError if the peer has ended, and TimeoutError after the deadline.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

LENGTH_BYTES = 8
PIECE_BYTES = 1 << 20


def send_frame(channel: socket.socket, parts: Sequence[bytes], deadline: float | None = None) -> None:
    """Send `parts` as one frame; `deadline` in monotonic seconds."""
    for part in (sum(map(len, parts)).to_bytes(LENGTH_BYTES, "little"), *parts):
        view = memoryview(part)
        while view:
            _set_deadline(channel, deadline)
            view = view[channel.send(view[:PIECE_BYTES]) :]


def receive_frame(channel: socket.socket, deadline: float | None = None) -> bytearray:
    """Receive and return the next frame, without its length; `deadline` in monotonic seconds."""
    length = _receive_bytes(channel, LENGTH_BYTES, deadline)
    return _receive_bytes(channel, int.from_bytes(length, "little"), deadline)


def _receive_bytes(channel: socket.socket, num_bytes: int, deadline: float | None) -> bytearray:
    frame = bytearray(num_bytes)
    view = memoryview(frame)
    while view:
        _set_deadline(channel, deadline)
        num_received = channel.recv_into(view[:PIECE_BYTES])
        if not num_received:
            raise ConnectionResetError("the peer is gone")
        view = view[num_received:]
    return frame


def _set_deadline(channel: socket.socket, deadline: float | None) -> None:
    """Set the socket's timeout to end at the deadline; TimeoutError if it has passed."""
    if deadline is not None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        channel.settimeout(left_s)
