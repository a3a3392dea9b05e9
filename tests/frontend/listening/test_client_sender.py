"""ClientSender between real sockets: the unread bytes of clients are bounded, for each and for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tokenloom.frontend.listening import client_sender
from tokenloom.frontend.listening.client_sender import (
    MAX_QUEUES,
    OVERHEAD_BYTES,
    TRACKED_BYTES,
    ClientLost,
    ClientSender,
)
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 30.0
MAX_BYTES = 20 << 20  # of all clients; the kernel and ZeroMQ's batches hold up to 1 MiB for each beside it
SLACK_BYTES = 1 << 20
GONE = ClientLost("gone", "its connection has ended")


class Rig:
    """A ROUTER socket with its sender, and clients at it."""

    def __init__(self, address: str, **limits: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = new_socket(self.context, zmq.ROUTER)
        self.trims: list[int] = []
        self.lost: ClientLost | None = None  # of the last send that failed
        self.sender = ClientSender(self.router, lambda: self.trims.append(self.sender.num_bytes), **limits)
        self.router.bind(address)
        self._address = address
        self._clients: list[zmq.Socket[bytes]] = []

    def client(self, identity: bytes) -> zmq.Socket[bytes]:
        """Connect a client with room for one message in its own queue."""
        client = new_socket(self.context, zmq.DEALER, identity=identity)
        client.setsockopt(zmq.RCVHWM, 1)
        client.connect(self._address)
        self._clients.append(client)
        client.send(b"")
        assert self.router.poll(int(DEADLINE_S * 1000))
        assert self.router.recv_multipart()[0] == identity
        return client

    def send(self, identity: bytes, num_messages: int, num_bytes: int) -> int:
        """Send up to so many messages; return how many were taken before the first that was not."""
        for number in range(num_messages):
            if (lost := self.sender.send(identity, bytes(num_bytes))) is not None:
                self.lost = lost
                return number
        return num_messages

    def tick_until(self, condition: Callable[[], bool]) -> None:
        def tick() -> bool:
            self.router.poll(1)
            self.sender.tick(self.sender.next_at)
            return condition()

        wait_until(tick)


@pytest.fixture
def new_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def new(**limits: int) -> Rig:
        rigs.append(Rig(f"ipc://{tmp_path}/s", **limits))
        return rigs[-1]

    yield new
    for rig in rigs:
        rig.context.destroy(linger=0)


@pytest.fixture
def rig(new_rig: Callable[..., Rig]) -> Rig:
    return new_rig(max_bytes=MAX_BYTES)


@pytest.mark.parametrize("num_bytes", [200, 13_000, 200_000])
def test_a_client_that_reads_nothing_is_held_up_at_its_share_and_others_are_served(rig: Rig, num_bytes: int) -> None:
    rig.client(b"idle")
    other = rig.client(b"other")
    taken = rig.send(b"idle", 100_000, num_bytes)
    found = taken * (num_bytes + OVERHEAD_BYTES)
    assert MAX_BYTES // 5 - SLACK_BYTES < found < MAX_BYTES // 5 + 2 * SLACK_BYTES
    assert rig.sender.num_bytes < MAX_BYTES // 5 + SLACK_BYTES
    assert rig.lost == ClientLost("slow", "4 MiB unread, at most 3 MiB may be beside 0 MiB of others")
    for _ in range(100):
        wait_until(lambda: rig.send(b"other", 1, num_bytes), "pyzmq's thread frees what was read")
        assert other.poll(int(DEADLINE_S * 1000)) and len(other.recv()) == num_bytes


def test_all_clients_together_are_bounded_and_one_with_nothing_unread_is_served(rig: Rig) -> None:
    num_clients = 30
    for number in range(num_clients):
        rig.client(b"%d" % number)
        rig.send(b"%d" % number, 1000, 100_000)
    assert MAX_BYTES / 2 < rig.sender.num_bytes < MAX_BYTES + num_clients * TRACKED_BYTES, "of 90 MB"
    rig.client(b"new")
    assert rig.send(b"new", 1, MAX_BYTES) == 1


def test_a_client_that_reads_again_is_served_again(rig: Rig) -> None:
    client = rig.client(b"c")
    taken = rig.send(b"c", 1000, 100_000)
    for _ in range(taken):
        assert client.poll(int(DEADLINE_S * 1000))
        client.recv()
    rig.tick_until(lambda: rig.sender.num_bytes == 0)
    assert rig.send(b"c", 1, 100_000) == 1


def test_memory_is_returned_to_the_system_when_the_client_leaves(new_rig: Callable[..., Rig]) -> None:
    rig = new_rig(max_bytes=8 * client_sender.TRIM_BYTES)
    client = rig.client(b"c")
    rig.send(b"c", 4000, 13_000)
    rig.sender.tick(0.0)
    assert rig.sender.next_at == client_sender.COLLECT_S and not rig.trims
    client.close()
    rig.tick_until(lambda: not rig.sender.num_bytes)
    assert rig.trims and rig.trims[-1] < client_sender.TRIM_BYTES
    assert rig.sender.next_at == client_sender.NEVER, "no timer without unread bytes"
    assert rig.send(b"c", 1, 1) == 0 and rig.lost == GONE


def test_a_tracked_message_arrives_as_it_was_and_in_order(rig: Rig) -> None:
    client = rig.client(b"c")
    frames = [bytes([number]) * (number * 397) for number in range(1, 120)]
    for frame in frames:
        assert rig.sender.send(b"c", frame) is None
    for frame in frames:
        assert client.poll(int(DEADLINE_S * 1000)) and client.recv() == frame


def test_clients_without_unread_bytes_are_forgotten(rig: Rig) -> None:
    for number in range(3 * MAX_QUEUES):
        assert rig.sender.send(b"never %d" % number, b"") == GONE
    assert len(rig.sender._queues) <= MAX_QUEUES


def test_a_client_with_too_many_messages_unread_is_slow(new_rig: Callable[..., Rig]) -> None:
    rig = new_rig(max_messages=10)
    rig.client(b"c")
    assert rig.send(b"c", 1_000_000, 1000) < 1_000_000
    assert rig.lost == ClientLost("slow", "10 messages unread, which is the limit")
