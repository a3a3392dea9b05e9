"""kernel_count: how many bytes of a TCP connection the kernel has taken over from its processes, and given to them.

The kernel counts the bytes that it has sent, those that it has sent again, and those that wait to be sent. Taken
bytes are delivered, even if the process that wrote them ends, as long as another process holds the connection. So the
count is the number of bytes that need not be written again. Needs Linux 4.19. (struct tcp_info in linux/tcp.h)
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import termios
from typing import NamedTuple

ESTABLISHED, CLOSE_WAIT = 1, 8  # states of a connection on which we can write; in CLOSE_WAIT the peer has sent its end
_INFO = struct.Struct("=B 119x Q Q 8x I 52x Q Q")  # state, bytes_acked, bytes_received, notsent, sent, retransmitted


class KernelCount(NamedTuple):
    """The counts of one connection at one moment. They begin at 0 when a connection is accepted."""

    num_taken: int  # bytes written by processes that the kernel has sent or will send
    num_read: int  # bytes received that processes have read
    is_writable: bool  # bytes may still be sent to the peer

    @classmethod
    def of(cls, connection: socket.socket) -> KernelCount:
        """Count the bytes of an accepted TCP connection. OSError if it is no TCP connection, or the kernel too old."""
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        if len(info) < _INFO.size:
            raise OSError(f"the kernel tells {len(info)} bytes about a connection, {_INFO.size} are needed")
        state, _, num_received, num_unsent, num_sent, num_resent = _INFO.unpack(info)
        has_peer_ended = state == CLOSE_WAIT  # the end counts as a byte
        return cls(
            num_taken=num_sent - num_resent + num_unsent,
            num_read=num_received - num_unread(connection) - has_peer_ended,
            is_writable=state in (ESTABLISHED, CLOSE_WAIT),
        )


def num_unread(connection: socket.socket) -> int:
    """Return the number of received bytes that no process has read."""
    count = array.array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, count)
    return count[0]
