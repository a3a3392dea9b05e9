"""Killed servers cut no connection: clients on plain sockets get each answer once and whole."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.tests.frontend.server.http.kept.supervised import word
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 60.0
AT_WRITING = ("http.journal", "http.write", "http.written")
POINTS = ("http.accept", "http.open", "http.read", *AT_WRITING, "http.adopt")
HEAD_AND_BODY = b"POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\n123456"
MODULE = "tokenloom.tests.frontend.server.http.kept.supervised"


class Supervised:
    """The supervisor's process, and the pids of the servers so far."""

    def __init__(self, faults: Path, mode: str = "on") -> None:
        self.faults = faults
        environment = os.environ | {"TOKENLOOM_FAULTS": str(faults)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.pids: list[int] = []
        self.clients: list[Client] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for_server(1)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.pids.extend(map(int, self.process.stdout))

    def wait_for_server(self, number: int) -> None:
        wait_until(lambda: len(self.pids) >= number, DEADLINE_S)

    def kill(self) -> None:
        """Kill the server, once it serves, and wait for the next one."""
        number = len(self.pids)
        with self.connect() as probe:
            assert probe.ask(b"/length") == b"0 "
        os.kill(self.pids[number - 1], signal.SIGKILL)
        self.wait_for_server(number + 1)

    def connect(self) -> Client:
        self.clients.append(Client(self.port))
        return self.clients[-1]

    def close(self) -> None:
        for each in self.clients:
            each.socket.close()
        self.process.communicate(timeout=DEADLINE_S)


class Client:
    """A connection on which the client parses answers itself."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        self._unread = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, target: bytes, body: bytes = b"", size: int | None = None) -> None:
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (target, len(body))
        self.socket.sendall((head + body)[:size])

    def ask(self, target: bytes, body: bytes = b"") -> bytes:
        self.send(target, body)
        return self.answer()

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._unread:
            self._more()
        found, _, self._unread = self._unread.partition(mark)
        return found

    def _more(self) -> None:
        if not (data := self.socket.recv(1 << 16)):
            raise ConnectionError(f"cut after {self._unread[-100:]!r}")
        self._unread += data

    def _take(self, count: int) -> bytes:
        while len(self._unread) < count:
            self._more()
        found, self._unread = self._unread[:count], self._unread[count:]
        return found

    def answer(self) -> bytes:
        """Read an answer and return its body; of an error, its status."""
        status, *fields = self._until(b"\r\n\r\n").lower().split(b"\r\n")
        headers = dict(field.split(b": ", 1) for field in fields)
        if b"content-length" in headers:
            body = self._take(int(headers[b"content-length"]))
            return body if b" 200 " in status else status.split()[1]
        body = b""
        while size := int(self._until(b"\r\n"), 16):
            body += self._take(size)
            assert self._take(2) == b"\r\n"
        assert self._until(b"\r\n") == b""
        return body


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.close()


def text_of(count: int) -> bytes:
    return b"".join(map(word, range(count)))


def is_whole(stream: bytes, count: int) -> bool:
    text, _, nonce = stream.partition(b"end ")
    return text == text_of(count) and len(nonce) == 32


def test_idle_unread_half_sent_and_untaken_survive(server: Supervised) -> None:
    with server.connect() as idle, server.connect() as unread, server.connect() as half, server.connect() as slow:
        body = random.Random(0).randbytes(300_000)
        assert idle.ask(b"/length", b"12") == b"2 12"
        half.send(b"/length", body, 200_000)
        slow.send(b"/tokens?30000", b"", None)  # an answer of 800 kB, after some seconds
        server.kill()
        server.kill()
        assert idle.ask(b"/length", b"345") == b"3 345"
        unread.send(b"/length", b"6789")
        half.socket.sendall((b"POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n" + body)[200_000:])
        assert half.answer() == b"300000 " + body[-10:]
        assert unread.answer() == b"4 6789"
        assert half.ask(b"/length", b"1") == b"1 1"


def test_streams_and_whole_answers_are_equal_through_kills(server: Supervised) -> None:
    counts, clients = [random.Random(number).randrange(50, 900) for number in range(20)], []
    for number, count in enumerate(counts):
        clients.append(server.connect())
        clients[-1].send(b"/%s?%d" % (b"tokens" if number % 4 == 3 else b"stream", count))
    for _ in range(6):
        server.kill()
    for number, (client, count) in enumerate(zip(clients, counts, strict=True)):
        found = client.answer()
        assert found == text_of(count) if number % 4 == 3 else is_whole(found, count)
        assert client.ask(b"/length", b"9") == b"1 9"


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_between_accept_and_the_last_byte_is_unseen(server: Supervised, point: str) -> None:
    clients = [server.connect() for _ in range(4)]
    for round_number in range(4):
        for client in clients:
            client.send(b"/stream?60")
        number = len(server.pids)
        inject(server.faults, point, "kill")
        if point == "http.adopt":
            server.kill()
        with server.connect() as new:
            new.send(b"/length", b"123456", 40)  # in two parts, so that a kill may come at either
            if point not in AT_WRITING:
                server.wait_for_server(number + 1)
            new.socket.sendall(HEAD_AND_BODY[40:])
            assert new.answer() == b"6 123456"
            server.wait_for_server(number + 1)
            assert new.ask(b"/length", b"7") == b"1 7"
        for client in clients:
            assert is_whole(client.answer(), 60), round_number
        assert not (server.faults / point).exists()


def test_a_request_that_kills_every_server_ends_with_an_error(server: Supervised) -> None:
    with server.connect() as client, server.connect() as other:
        other.send(b"/stream?400")
        assert client.ask(b"/deadly") == b"500"
        assert is_whole(other.answer(), 400)


@pytest.mark.parametrize(("first", "second"), [(b"/plain?500", b""), (b"/stream?500", b"/length")])
def test_streams_that_cannot_go_on_are_cut(server: Supervised, first: bytes, second: bytes) -> None:
    with server.connect() as client:
        client.send(first)
        if second:  # before the first answer
            client.send(second)
        client._until(b"10")
        server.kill()
        with pytest.raises(ConnectionError):
            client.answer()


def test_a_head_request_gets_a_head_alone(server: Supervised) -> None:
    with server.connect() as client:
        client.socket.sendall(b"HEAD /stream?30 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client._until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert client.ask(b"/length", b"9") == b"1 9"


@pytest.mark.parametrize("head", [b"HTTP/1.0\r\n", b"HTTP/1.0\r\nconnection: keep-alive\r\n"])
def test_a_client_that_knows_no_chunks_reads_to_the_end_through_a_kill(server: Supervised, head: bytes) -> None:
    with server.connect() as client:
        client.socket.sendall(b"GET /stream?900 " + head + b"host: x\r\n\r\n")
        assert b"chunked" not in client._until(b"\r\n\r\n")
        server.kill()
        with pytest.raises(ConnectionError, match="cut after"):
            client._until(b"no such text")
        assert is_whole(client._unread, 900)


def test_a_request_that_waits_for_100_continue_gets_it_once_through_a_kill(server: Supervised) -> None:
    with server.connect() as client:
        client.socket.sendall(b"POST /length HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        assert client._until(b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        server.kill()
        client.socket.sendall(b"hello")
        assert client.answer() == b"5 hello"


def test_a_chunked_body_with_trailers_is_read_on_after_a_kill(server: Supervised) -> None:
    with server.connect() as client:
        client.socket.sendall(b"POST /length HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        server.kill()
        client.socket.sendall(b"0\r\na: b\r\n\r\n")
        assert client.answer() == b"5 hello"
        assert client.ask(b"/length", b"9") == b"1 9"


def test_requests_read_together_are_all_answered(server: Supervised) -> None:
    requests = b"POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab" * 3
    with server.connect() as client:
        for _ in range(2):
            client.socket.sendall(requests)
            assert [client.answer() for _ in range(3)] == [b"2 ab"] * 3
        server.kill()
        assert client.ask(b"/length", b"9") == b"1 9"  # later requests are covered


def test_a_request_read_with_the_rest_of_an_answered_one_is_served_and_cut_by_a_kill(server: Supervised) -> None:
    with server.connect() as client, server.connect() as other:
        for each in (client, other):
            each.send(b"/early", bytes(10), -10)
            assert each.answer() == b"early"
            each.socket.sendall(bytes(10) + b"POST /stream?400 HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        assert is_whole(client.answer(), 400)
        assert client.ask(b"/length", b"9") == b"1 9"
        other.send(b"/early", bytes(10), -10)
        assert is_whole(other.answer(), 400) and other.answer() == b"early"
        other.socket.sendall(bytes(10) + b"POST /stream?9000 HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        other._until(b"10 ")
        server.kill()
        assert client.ask(b"/length", b"9") == b"1 9"
        with pytest.raises(ConnectionError):
            other._until(b"end ")


def test_without_kept_connections_a_kill_cuts_all(tmp_path: Path) -> None:
    server = Supervised(tmp_path, "off")
    with server.connect() as client, server.connect() as idle:
        assert idle.ask(b"/length") == b"0 "
        client.send(b"/stream?500")
        client._until(b"10")
        server.kill()
        for each in (client, idle):
            with pytest.raises(ConnectionError):
                each.ask(b"/length")
                each.answer()
    server.close()
