"""Notifies the service manager (systemd's sd_notify protocol) when the engine serves and when it stops.

The manager names a datagram socket in NOTIFY_SOCKET; without this variable nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket

READY, STOPPING = "READY=1", "STOPPING=1"


def notify(state: str, status: str) -> None:
    """Send READY or STOPPING and a line for `systemctl status` to the manager, if there is one. Ignores errors."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        sender.sendto(f"{state}\nSTATUS={status}".encode(), address)
