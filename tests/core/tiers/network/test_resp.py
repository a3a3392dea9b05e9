"""RESP over a socket: replies arrive whole however they are cut, values land in place, odd bytes raise OSError."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tokenloom.core.tiers.network.resp import Connection, Reply, ServerError, command
from tokenloom.tests.support.waiting import Deadline

LIMIT_S = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield Connection(ours), theirs
    ours.close()
    theirs.close()


def feed(sock: socket.socket, data: bytes, sizes: random.Random) -> threading.Thread:
    """Send data in pieces of random sizes, in a thread."""

    def send() -> None:
        start = 0
        while start < len(data):
            size = sizes.choice((1, 2, 3, 100, 5000))
            sock.sendall(data[start : start + size])
            start += size

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def soon() -> float:
    return time.monotonic() + LIMIT_S


def test_a_command_is_an_array_of_its_words() -> None:
    assert command(b"GET", b"a\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n"


@pytest.mark.parametrize("seed", range(5))
def test_replies_in_any_pieces_come_in_order(pair: tuple[Connection, socket.socket], seed: int) -> None:
    connection, theirs = pair
    replies: list[tuple[bytes, Reply]] = [
        (b"+OK\r\n", b"OK"),
        (b":-42\r\n", -42),
        (b"$-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$9\r\na\r\nb\r\n\x00cd\r\n", b"a\r\nb\r\n\x00cd"),
        (b"-OOM too much\r\n", ServerError("OOM too much")),
        (b"*2\r\n:1\r\n*1\r\n$1\r\nx\r\n", [1, [b"x"]]),
        (b"$20000\r\n" + b"y" * 20000 + b"\r\n", b"y" * 20000),
    ]
    chosen = random.Random(seed).choices(replies, k=60)
    thread = feed(theirs, b"".join(data for data, _ in chosen), random.Random(seed))
    assert [connection.receive(soon()) for _ in chosen] == [reply for _, reply in chosen]
    thread.join(LIMIT_S)
    assert connection.is_usable()


@pytest.mark.parametrize("seed", range(5))
def test_values_land_in_their_parts_and_others_leave_them(pair: tuple[Connection, socket.socket], seed: int) -> None:
    connection, theirs = pair
    dice = random.Random(seed)
    value = dice.randbytes(4096 + 30000 + 32)
    kinds = dice.choices("vmlte", k=40)
    data = {
        "v": b"$%d\r\n%b\r\n" % (len(value), value),
        "m": b"$-1\r\n",
        "l": b"$%d\r\n%b\r\n" % (len(value) - 1, value[1:]),
        "t": b"-WRONGTYPE no\r\n",
        "e": b"$0\r\n\r\n",
    }
    expected = {"v": True, "m": None, "l": False, "t": ServerError("WRONGTYPE no"), "e": False}
    feed(theirs, b"".join(data[kind] for kind in kinds), dice)
    for kind in kinds:
        parts = [memoryview(bytearray(size)) for size in (4096, 30000, 32)]
        assert connection.receive_value(parts, soon()) == expected[kind]
        assert b"".join(parts) == (value if kind == "v" else bytes(len(value)))


def test_long_buffers_are_sent_whole(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    buffers = [random.Random(size).randbytes(size) for size in (10, 0, 300_000, 1, 1_000_000)] * 20
    received = bytearray()

    def receive() -> None:
        while data := theirs.recv(77_777):
            received.extend(data)

    thread = threading.Thread(target=receive)
    thread.start()
    connection.send(buffers, soon())
    connection.close()
    thread.join(LIMIT_S)
    assert bytes(received) == b"".join(buffers)


def test_a_peer_that_does_not_read_or_send_ends_the_wait_at_the_deadline(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, theirs = pair
    with pytest.raises(TimeoutError):
        connection.send([bytes(1 << 24)], time.monotonic() + 0.05)
    theirs.sendall(b"$100\r\nabc")
    with pytest.raises(TimeoutError):
        connection.receive_value([memoryview(bytearray(100))], time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        connection.receive(time.monotonic() - 1)


def test_silence_ends_the_wait_long_before_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    deadline = Deadline(LIMIT_S / 2)
    with ours, theirs, pytest.raises(TimeoutError):
        Connection(ours, silence_s=0.05).receive(soon())
    assert not deadline.has_passed()


@pytest.mark.parametrize(
    "data",
    [b"$1\r\nab\r\n", b"?\r\n", b"$x\r\n", b"*1\r\n" * 9, b"*9999999\r\n", b"$999999999\r\n", b"+" + bytes(9000)],
)
def test_bytes_of_another_protocol_raise_an_os_error(pair: tuple[Connection, socket.socket], data: bytes) -> None:
    connection, theirs = pair
    theirs.sendall(data)
    with pytest.raises(ConnectionError):
        connection.receive(soon())


def test_a_connection_with_unread_bytes_or_at_its_end_is_not_usable(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    assert connection.is_usable()
    theirs.sendall(b"+1\r\n+2\r\n")
    assert not connection.is_usable()
    assert connection.receive(soon()) == b"1"
    assert not connection.is_usable()
    assert connection.receive(soon()) == b"2"
    assert connection.is_usable()
    theirs.close()
    assert not connection.is_usable()
    with pytest.raises(ConnectionError):
        connection.receive(soon())
