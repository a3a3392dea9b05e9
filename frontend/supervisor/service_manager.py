"""The service manager's protocol (sd_notify): systemd learns when the engine serves and when it stops.

A service manager that wants to know names a datagram socket in NOTIFY_SOCKET; without one nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket

READY, STOPPING = "READY=1", "STOPPING=1"


def notify(state: str, status: str) -> None:
    """Send a state and the line that `systemctl status` shows. A manager that cannot be reached is ignored."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        sender.sendto(f"{state}\nSTATUS={status}".encode(), address)
