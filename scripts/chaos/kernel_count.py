"""Kill writers of TCP connections at random moments, and let others go on from the kernel's count: no byte is wrong.

    python scripts/chaos/kernel_count.py --streams 50 --kills 200

Each of --streams connections is written by a process that is killed with SIGKILL --kills times. After each kill the
kernel's count (frontend/listening/kernel_count.py) is read from a duplicate, and the next writer begins there. The
bytes tell their place in the stream, and the client compares each. --path veth puts a virtual link of 100 Mbit/s in
between, and --path lossy one that loses 3 % of the packets, repeats 1 % and delays 5 % (lossy_link.py); both need root.
Slow readers and a small receive buffer are mixed in. Prints the counts, and exits with 1 if a byte was wrong or
missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tokenloom.frontend.listening.kernel_count import KernelCount
from tokenloom.scripts.bench.report import print_json
from tokenloom.scripts.bench.runner import read_options
from tokenloom.scripts.chaos.lossy_link import LossyLink

WORD = 8  # bytes that tell their place
LONGEST_S = 0.01  # life of a writer
HOST, SPACE = "10.77.0.1", "tokenloom-count"
PATIENCE_S = 60.0


def pattern(place: int, num_bytes: int) -> bytes:
    """Return the bytes of a stream from `place` on, which tell their place."""
    first = place // WORD
    words = b"".join(number.to_bytes(WORD, "little") for number in range(first, (place + num_bytes) // WORD + 1))
    return words[place - first * WORD :][:num_bytes]


def write_from(connection: socket.socket, place: int, seed: int) -> None:
    """Write the stream from `place` on, in pieces of random sizes, until this process is killed."""
    draw = random.Random(seed)
    while True:
        piece = pattern(place, draw.choice((1, 250, 5000, 100_000)))
        connection.sendall(piece)
        place += len(piece)


@dataclass
class Stream:
    """A connection with a client that compares each byte."""

    connection: socket.socket
    client: socket.socket
    is_slow: bool
    num_read: int = 0
    num_wrong: int = 0

    def compare(self) -> None:
        while data := self.client.recv(4096 if self.is_slow else 1 << 16):
            self.num_wrong += data != pattern(self.num_read, len(data))
            self.num_read += len(data)
            if self.is_slow:
                time.sleep(0.001)


def kill_writers(stream: Stream, num_kills: int, seed: int) -> int:
    """Let `num_kills` writers write and be killed. Return how many bytes the kernel has counted."""
    draw, place = random.Random(seed), 0
    for number in range(num_kills):
        pid = os.fork()
        if pid == 0:
            try:
                write_from(stream.connection, place, seed * num_kills + number)
            finally:
                os._exit(1)
        until = time.monotonic() + PATIENCE_S
        while KernelCount.of(stream.connection).num_taken == place and time.monotonic() < until:
            time.sleep(0.0002)  # it has not written yet
        time.sleep(draw.random() * LONGEST_S)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        place = KernelCount.of(stream.connection).num_taken
    return place


def measure(num_streams: int, num_kills: int, host: str = "127.0.0.1", netns: str = "") -> dict[str, object]:
    """Kill the writers of one connection after the other."""
    wrong = missing = num_bytes = 0
    for number in range(num_streams):
        with contextlib.ExitStack() as opened:
            stream = Stream(*_connect(opened, host, netns, number), is_slow=number % 3 == 2)
            reader = threading.Thread(target=stream.compare, daemon=True)
            reader.start()
            place = kill_writers(stream, num_kills, number)
            stream.connection.shutdown(socket.SHUT_WR)
            reader.join(PATIENCE_S)
            wrong += stream.num_wrong
            missing += stream.num_read != place
            num_bytes += place
    return {"counts": num_streams * num_kills, "bytes": num_bytes, "wrong pieces": wrong, "wrong lengths": missing}


def _connect(opened: contextlib.ExitStack, host: str, netns: str, number: int) -> tuple[socket.socket, socket.socket]:
    """Return an accepted connection and its client, which is in the network namespace `netns`."""
    listener = opened.enter_context(socket.create_server((host, 0)))
    with _inside(netns):
        client = opened.enter_context(socket.socket())
    if number % 3 == 1:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
    client.connect(listener.getsockname())
    connection, _ = listener.accept()
    return opened.enter_context(connection), client


@contextlib.contextmanager
def _inside(netns: str) -> Iterator[None]:
    """Make sockets of this thread in another network namespace."""
    if not netns:
        yield
        return
    with open("/proc/self/ns/net", "rb") as ours, open(f"/run/netns/{netns}", "rb") as theirs:
        _set_namespace(theirs.fileno())
        try:
            yield
        finally:
            _set_namespace(ours.fileno())


def _set_namespace(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def veth() -> Iterator[str]:
    """Make a network namespace behind a virtual link of 100 Mbit/s, and remove it."""
    commands = (
        f"ip netns add {SPACE}",
        f"ip link add loom0 type veth peer name loom1 netns {SPACE}",
        f"ip address add {HOST}/24 dev loom0",
        "ip link set loom0 up",
        f"ip -n {SPACE} address add 10.77.0.2/24 dev loom1",
        f"ip -n {SPACE} link set loom1 up",
        "tc qdisc add dev loom0 root tbf rate 100mbit burst 32kbit latency 50ms",
    )
    try:
        for each in commands:
            subprocess.run(each.split(), check=True)
        yield SPACE
    finally:
        subprocess.run(["ip", "netns", "del", SPACE], check=False)


OPTIONS = {"--streams": (50,), "--kills": (200,), "--path": ("loopback",)}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    if arguments.path == "veth":
        with veth() as netns:
            report = measure(arguments.streams, arguments.kills, HOST, netns)
    elif arguments.path == "lossy":
        with contextlib.closing(LossyLink(SPACE)) as link:
            report = measure(arguments.streams, arguments.kills, link.host, link.netns) | {"packets": link.counts}
    else:
        report = measure(arguments.streams, arguments.kills)
    print_json(report, arguments.json)
    return 1 if report["wrong pieces"] or report["wrong lengths"] else 0


if __name__ == "__main__":
    sys.exit(main())
