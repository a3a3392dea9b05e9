"""LossyLink: a network path into another namespace that loses, repeats, delays and reorders packets.

Two TUN interfaces, one on each side, and a thread that carries the packets between them. Needs root, and neither a
module of the kernel nor a traffic shaper.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET_BYTES = 1 << 16
LOSS, REPEAT, REORDER = 0.03, 0.01, 0.05  # shares of the packets
DELAYS_S = (0.002, 0.010)  # of a packet that others overtake


def _open_tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


class LossyLink:
    """Owner of both interfaces, of the namespace and of the thread. Our side has address 1 of `network`, the other side
    address 2. `counts`: packets carried, lost, repeated and delayed."""

    def __init__(self, netns: str, network: str = "10.78.0", seed: int = 0) -> None:
        self.netns, self.host = netns, f"{network}.1"
        self.counts = {"carried": 0, "lost": 0, "repeated": 0, "delayed": 0}
        self._draw = random.Random(seed)
        self._fds = [_open_tun("loomtun0"), _open_tun("loomtun1")]
        self._late: list[tuple[float, int, int, bytes]] = []  # when to send, number, to which side, packet
        commands = (
            f"ip netns add {netns}",
            f"ip link set loomtun1 netns {netns}",
            f"ip address add {network}.1/24 dev loomtun0",
            "ip link set loomtun0 up",
            f"ip -n {netns} address add {network}.2/24 dev loomtun1",
            f"ip -n {netns} link set loomtun1 up",
        )
        for each in commands:
            subprocess.run(each.split(), check=True)
        self._is_over = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        while not self._is_over:
            wait_s = max(self._late[0][0] - time.monotonic(), 0.0) if self._late else 0.1
            readable, _, _ = select.select(self._fds, [], [], wait_s)
            for fd in readable:
                self._take(os.read(fd, MAX_PACKET_BYTES), 1 - self._fds.index(fd))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, side, packet = heapq.heappop(self._late)
                self._send(side, packet)

    def _take(self, packet: bytes, side: int) -> None:
        """Decide about a packet to a side."""
        self.counts["carried"] += 1
        draw = self._draw.random()
        if draw < LOSS:
            self.counts["lost"] += 1
        elif draw < LOSS + REPEAT:
            self.counts["repeated"] += 1
            self._send(side, packet)
            self._send(side, packet)
        elif draw < LOSS + REPEAT + REORDER:
            self.counts["delayed"] += 1
            when = time.monotonic() + self._draw.uniform(*DELAYS_S)
            heapq.heappush(self._late, (when, self.counts["carried"], side, packet))
        else:
            self._send(side, packet)

    def _send(self, side: int, packet: bytes) -> None:
        try:
            os.write(self._fds[side], packet)
        except OSError:  # its queue is full: lost, as on any link
            self.counts["lost"] += 1

    def close(self) -> None:
        """Remove the link and the namespace."""
        self._is_over = True
        self._thread.join()
        for fd in self._fds:
            os.close(fd)
        subprocess.run(["ip", "netns", "del", self.netns], check=False)
