"""The kernel's count of a connection leaves no byte out, with killed writers and slow readers."""

from __future__ import annotations

import socket

from tokenloom.frontend.listening.kernel_count import KernelCount
from tokenloom.scripts.chaos import kernel_count


def test_killed_writers_are_continued_without_a_wrong_or_missing_byte() -> None:
    report = kernel_count.measure(num_streams=6, num_kills=10)
    assert report["wrong pieces"] == report["wrong lengths"] == 0 and report["bytes"] > 10_000  # type: ignore[operator]


def test_bytes_in_both_directions_are_counted_and_an_end_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            client.sendall(b"12345")
            assert accepted.recv(2) == b"12"
            assert KernelCount.of(accepted) == (0, 2, True)
            client.shutdown(socket.SHUT_WR)
            accepted.sendall(b"abc")
            while len(accepted.recv(100, socket.MSG_PEEK)) < 3:
                pass
            assert KernelCount.of(accepted) == (3, 2, True)
            assert accepted.recv(100) == b"345" and accepted.recv(100) == b""
            assert KernelCount.of(accepted) == (3, 5, True)
            accepted.shutdown(socket.SHUT_WR)
            assert not KernelCount.of(accepted).is_writable
