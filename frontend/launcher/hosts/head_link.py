"""HeadLink: an agent's connection to the head of an engine, with its lease.

Each connection has a new identity, so that no message of an earlier connection is taken for one of this. A machine has
one agent for a head at a time, so a new one shows the head that the one before has ended. A wrong key is an error; if
the head does not run, the agent waits for it.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterator

import zmq

from ....ipc.codec import encode
from ....ipc.errors import ConfigError
from ....ipc.messages.base import LEASE_S, PROTOCOL_VERSION
from ....ipc.messages.hosts import AgentToHead, HeadToAgent, HostHello
from ....ipc.sockets.channel import Channel
from ....ipc.sockets.endpoints import route_to, split_tcp, tcp_address
from ....ipc.sockets.keys import Keys
from ....ipc.sockets.zmq_sockets import new_socket
from ....ipc.version import numerics_digest, tokenloom_version

MAX_FAILED_HANDSHAKES = 3  # in a row: a head that dies may break off one of them
FAREWELL_MS = 200  # time for sending the last messages
_MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_names = itertools.count()


class HeadAddress:
    """Address of the head, and the address of this host from which to connect to it."""

    def __init__(self, head: str, own: str | None) -> None:
        """Parse `head`, which is tcp://HOST:PORT; ConfigError if it is not. `own`: this host's address; None: the one
        that routing selects."""
        self.head, self._own = head, own
        try:
            self.host, self.port = split_tcp(head)
        except ValueError as error:
            raise ConfigError(f"{error}: give the address that the head logs at its start") from None

    def resolve(self) -> tuple[str, str]:
        """Return the head's IP address and our own for the connection. OSError if there is no route, or if
        --own-address is not an address of this machine."""
        head, own = route_to(self.host, self.port)
        if self._own is None:
            return head, own
        with socket.socket(socket.AF_INET6 if ":" in self._own else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((self._own, 0))
            except OSError as error:
                raise OSError(f"--own-address {self._own} is no address of this machine: {error.strerror}") from None
        return head, self._own


class HeadLink:
    """Connection of an agent to the head. Owns the socket. `own`: this host's IP address."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: HeadAddress, keys: Keys, placement: str = ""
    ) -> None:
        """Connect and send HostHello with `placement`. OSError if there is no route to the head, or another process of
        this machine is its agent."""
        head, self.own = address.resolve()
        self._place = address.head
        self._name = hold_name(f"tokenloom-host {head} {address.port} {self.own}", address.head)
        self.socket = new_socket(context, zmq.DEALER, identity=b"host-" + secrets.token_hex(8).encode())
        keys.secure_client(self.socket)
        self.monitor = self.socket.get_monitor_socket(_MONITORED, f"inproc://head-{next(_names)}")
        self._num_failed = 0
        self._channel: Channel[HeadToAgent, AgentToHead] = Channel(self.socket, HeadToAgent, "head")
        source, target = tcp_address(self.own, 0), tcp_address(head, address.port).removeprefix("tcp://")
        self.socket.connect(f"{source};{target}")
        self._heard_at = time.monotonic()
        self.has_heard = False  # whether the head has sent anything
        self.send(
            HostHello(
                protocol_version=PROTOCOL_VERSION,
                version=tokenloom_version(),
                numerics=numerics_digest(),
                address=self.own,
                num_gpus=_num_gpus(),
                num_cpus=len(os.sched_getaffinity(0)),
                placement=placement,
            )
        )

    @property
    def lease_s(self) -> float:
        """The seconds until the lease ends, unless the head sends something."""
        return self._heard_at + LEASE_S - time.monotonic()

    def receive(self) -> Iterator[HeadToAgent]:
        """Yield all waiting messages. ConfigError if the head does not accept our key."""
        for message in self._channel.receive():
            self._heard_at, self.has_heard = time.monotonic(), True
            yield message
        while self.monitor.poll(0):
            event = int.from_bytes(self.monitor.recv_multipart()[0][:2], "little")
            self._num_failed = 0 if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else self._num_failed + 1
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or self._num_failed == MAX_FAILED_HANDSHAKES:
                raise ConfigError(f"{self._place} has other keys than --key-file: give the head's --hosts-key-file")

    def send(self, message: AgentToHead) -> None:
        """Send a message; drop it if the head has refused our key, which `receive` reports."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.disable_monitor()  # in this order: an unread event would block ZeroMQ's thread
        self.monitor.close(linger=0)
        self.socket.close(FAREWELL_MS)
        self._name.close()


def hold_name(name: str, head: str) -> socket.socket:
    """Hold a name in the kernel's abstract namespace until the socket is closed or this process ends, however it ends.
    All processes with this machine's addresses share it, in containers with the host's network too. OSError if another
    one holds it."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0{name}")
    except OSError:
        held.close()
        raise OSError(f"another agent on this machine serves {head}: stop one of them") from None
    return held


def _num_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or else all device
    nodes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() and each.strip() != "-1"])
    return len(glob.glob("/dev/nvidia[0-9]*"))
