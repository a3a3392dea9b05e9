"""Frames on a stream socket between a process and its child: 8 bytes with the length, then that many bytes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

LENGTH_BYTES = 8
PIECE_BYTES = 1 << 20


def length_of(parts: Sequence[bytes]) -> bytes:
    """Return the head of a frame that consists of `parts`."""
    return sum(map(len, parts)).to_bytes(LENGTH_BYTES, "little")


def send_frame(channel: socket.socket, parts: Sequence[bytes]) -> None:
    """Send `parts` as one frame; blocks until it is sent. Raises ConnectionError if the peer has ended."""
    for part in (length_of(parts), *parts):
        channel.sendall(part)


def receive_frame(channel: socket.socket) -> bytearray:
    """Block until the next frame is there, and return it without its head. Raises ConnectionError if the peer has
    ended."""
    length = _receive_bytes(channel, LENGTH_BYTES)
    return _receive_bytes(channel, int.from_bytes(length, "little"))


def take_frames(received: bytearray) -> Iterator[bytes]:
    """Remove the complete frames from the front of the received bytes, and yield each without its head."""
    while len(received) >= LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "little")
        if len(received) < end:
            return
        with memoryview(received) as view:
            frame = bytes(view[LENGTH_BYTES:end])
        del received[:end]
        yield frame


def _receive_bytes(channel: socket.socket, num_bytes: int) -> bytearray:
    frame = bytearray(num_bytes)
    view = memoryview(frame)
    while view:
        num_received = channel.recv_into(view[:PIECE_BYTES])
        if not num_received:
            raise ConnectionResetError("the peer is gone")
        view = view[num_received:]
    return frame
