"""Engines that load blocks from each other: content arrives whole or not at all, and no engine harms another."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from tokenloom.core.tiers.network import peer_server
from tokenloom.core.tiers.network.breaker import Breaker
from tokenloom.core.tiers.network.peer import PeerSource
from tokenloom.core.tiers.network.peer_server import LOAD, PeerServer, peer_keys
from tokenloom.core.tiers.network.sealed_format import MAC_BYTES
from tokenloom.core.tiers.object_format import HEADER_BYTES
from tokenloom.core.tiers.source import Item, Namespace
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.process.arena import PAGE
from tokenloom.tests.core.tiers.network.peer_host import Host
from tokenloom.tests.core.tiers.slots import (
    DEADLINE_S,
    NAMESPACE,
    SECRET,
    SIGNED,
    SLOT_BYTES,
    content_of,
    empty,
    filled,
    find,
    key_of,
    load,
)
from tokenloom.tests.core.tiers.test_finder import SetSource
from tokenloom.tests.support.waiting import Deadline, wait_until

SHORT_S = 0.1  # a deadline that a test waits for
SOON_S = 10.0  # half the time in which a call gives up
PERIOD_S = 5.0  # for which a peer that failed is not asked


class DiskOf(SetSource):
    """A disk source with these blocks, all of one length."""

    def __init__(self, numbers: Sequence[int], num_bytes: int = SLOT_BYTES) -> None:
        super().__init__("disk")
        self.keys = set(map(key_of, numbers))
        self._num_bytes = num_bytes

    def find(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> int:
        return super().find(keys, num_bytes, deadline) if num_bytes == self._num_bytes else 0

    def may_have(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> list[bool]:
        return [key in self.keys and num_bytes == self._num_bytes for key in keys]

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
        for index, item in enumerate(items):
            is_good = item.key in self.keys and len(item.slot) == self._num_bytes
            if is_good:
                item.slot[:] = content_of(item.key, self._num_bytes)
            on_loaded(index, is_good)


class Net:
    """The engines of a test, in this process or in others, and the clock of their breakers."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack, self.now = folder, stack, 0.0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(lambda: self.context.destroy(linger=0))

    def address(self, name: str = "p") -> str:
        return f"ipc://{self.folder}/{name}"

    def serve(self, host: Host, address: str = "", secret: bytes = b"", **options: object) -> PeerServer:
        server = host.serve(address or self.address(), secret, **options)  # type: ignore[arg-type]
        self._stack.callback(server.close)
        return server

    def source(self, *addresses: str, namespace: Namespace = NAMESPACE, **limits: float) -> PeerSource:
        breaker: Callable[[], Breaker] = lambda: Breaker(first_period_s=PERIOD_S, clock=lambda: self.now)  # noqa: E731
        source = PeerSource(addresses or [self.address()], lambda: None, breaker, **limits)  # type: ignore[arg-type]
        self._stack.callback(source.close)
        source.open(namespace)
        return source

    def find_later(self, source: PeerSource, numbers: Sequence[int], limit_s: float = DEADLINE_S) -> int:
        """Find blocks when no peer is left alone any more."""
        self.now += 100 * PERIOD_S
        return find(source, numbers, limit_s)

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        self._stack.callback(lambda: socket.close(linger=0))
        return socket

    def start_process(self, count: int, address: str = "") -> tuple[subprocess.Popen[str], str]:
        """Start an engine with blocks 0 … count - 1; return its process and address."""
        module = "tokenloom.tests.core.tiers.network.peer_host"
        process = subprocess.Popen(
            [sys.executable, "-m", module, address or self.address(), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def answer_all(self, answers: Callable[[list[bytes]], list[bytes] | None], name: str = "p") -> None:
        """Answer at an address whatever comes; None: nothing."""
        router, goes_on = self.socket(zmq.ROUTER), threading.Event()
        router.bind(self.address(name))

        def run() -> None:
            while not goes_on.is_set():
                if router.poll(20):
                    client, *frames = router.recv_multipart()
                    if (answer := answers(frames)) is not None:
                        router.send_multipart([client, *answer])

        thread = threading.Thread(target=run)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(goes_on.set)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    with contextlib.ExitStack() as stack:
        yield Net(tmp_path, stack)


def freeze(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


# ── blocks of a peer arrive ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:0"])
def test_blocks_of_host_and_disk_are_found_and_loaded(net: Net, address: str, secret: bytes) -> None:
    host = Host(filled([*range(10), *range(20, 30)]))
    server = net.serve(host, address, secret, disk=DiskOf(range(10, 25)))
    source = net.source(server.address, namespace=NAMESPACE._replace(secret=secret))
    wait_until(lambda: net.find_later(source, range(50)) == 30)
    assert find(source, range(40, 50)) == 0
    assert load(source, range(30)) == [True] * 30
    state = source.state()
    assert (state.num_read, state.rejected) == (30, {})
    assert not +host.pins and host.num_pins >= 3
    assert source.store(filled(range(3))) == [False] * 3


def test_the_peer_with_the_longest_run_is_asked(net: Net) -> None:
    hosts = [Host(filled(range(count))) for count in (3, 9, 6)]
    source = net.source(*(net.serve(host, net.address(str(i))).address for i, host in enumerate(hosts)))
    assert find(source, range(12)) == 9
    assert load(source, range(9)) == [True] * 9
    assert [host.num_pins for host in hosts] == [1, 2, 1]


def test_many_blocks_come_in_several_requests(net: Net) -> None:
    host = Host(filled(range(40)))
    net.serve(host, load_bytes=3 * SLOT_BYTES, max_sending_bytes=12 * SLOT_BYTES)
    source = net.source(load_bytes=3 * SLOT_BYTES)
    assert find(source, range(40)) == 40
    assert load(source, range(40)) == [True] * 40
    assert host.num_pins == 1 + 14


def test_a_block_that_has_left_the_peer_is_a_miss(net: Net) -> None:
    host = Host(filled(range(8)))
    net.serve(host)
    source = net.source()
    assert find(source, range(8)) == 8
    del host.items[5]
    assert load(source, range(8)) == [True] * 5 + [False] + [True] * 2
    assert source.state().num_failed == 0 and not +host.pins


def test_an_engine_of_another_namespace_gets_nothing(net: Net) -> None:
    host = Host(filled(range(4)))
    server = net.serve(host)
    other = NAMESPACE._replace(digest=bytes(32))
    source = net.source(namespace=other)
    assert find(source, range(4)) == 0 and host.num_pins == 0
    source.open(NAMESPACE)
    assert find(source, range(4)) == 4
    server.open(other)
    assert load(source, range(4)) == [False] * 4


LARGE_BYTES = 3 * PAGE + 7
OF_GROUPS = NAMESPACE._replace(slot_bytes=(SLOT_BYTES, LARGE_BYTES))


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_blocks_of_two_lengths_come_from_host_and_disk(net: Net, secret: bytes) -> None:
    host = Host([*filled(range(4)), *filled(range(20, 24), num_bytes=LARGE_BYTES)])
    disk = DiskOf(range(22, 27), LARGE_BYTES)
    server = net.serve(host, "tcp://127.0.0.1:0", secret, disk=disk, namespace=OF_GROUPS, load_bytes=2 * LARGE_BYTES)
    namespace = OF_GROUPS._replace(secret=secret)
    source = net.source(server.address, namespace=namespace, load_bytes=2 * LARGE_BYTES)
    net.now += 100 * PERIOD_S
    wait_until(lambda: net.find_later(source, range(6)) == 4)
    assert find(source, range(20, 30), num_bytes=LARGE_BYTES) == 7
    items = [*empty([0, 1]), *empty(range(20, 27), LARGE_BYTES), *empty([2, 3])]
    results: dict[int, bool] = {}
    source.load(items, time.monotonic() + DEADLINE_S, results.__setitem__)
    assert results == dict.fromkeys(range(11), True)
    assert all(item.slot == content_of(item.key, len(item.slot)) for item in items)
    state = source.state()
    of_object = HEADER_BYTES + (MAC_BYTES if secret else 0)
    assert (state.num_read, state.read_bytes) == (11, 4 * SLOT_BYTES + 7 * LARGE_BYTES + 11 * of_object)
    assert (state.rejected, state.num_failed) == ({}, 0) or (state.num_failed and not state.rejected)
    assert not +host.pins
    assert load(source, [20, 0], num_bytes=SLOT_BYTES) == [False, True], "a block of another length"


@pytest.mark.parametrize("namespace", [NAMESPACE, OF_GROUPS])
def test_of_blocks_with_gaps_those_are_told_that_any_peer_has(net: Net, namespace: Namespace) -> None:
    hosts = [Host(filled([1, 5, 6])), Host(filled([8]))]
    disk, others = DiskOf([3, 6]), namespace._replace(digest=bytes(32))
    first = net.serve(hosts[0], net.address("a"), disk=disk, namespace=namespace)
    second = net.serve(hosts[1], net.address("b"), namespace=namespace)
    stranger = net.serve(Host(filled(range(10))), net.address("c"), namespace=others)
    source = net.source(first.address, second.address, stranger.address, namespace=namespace)
    keys = [key_of(number) for number in range(10)]

    def held() -> list[int]:
        hints = source.may_have(keys, SLOT_BYTES, time.monotonic() + DEADLINE_S)
        return [number for number, may_have in enumerate(hints) if may_have]

    assert held() == [1, 3, 5, 6, 8]
    assert find(source, range(10)) == 0 and not +hosts[0].pins
    assert source.may_have(keys, SLOT_BYTES, time.monotonic() - 1) == [False] * 10
    second.open(others)
    assert held() == [1, 3, 5, 6]


def test_a_request_for_a_length_that_no_group_has_is_declined(net: Net) -> None:
    host = Host([*filled(range(4)), *filled(range(20, 24), num_bytes=LARGE_BYTES)])
    server = net.serve(host, namespace=OF_GROUPS)
    client = net.socket(zmq.DEALER)
    client.connect(server.address)
    digest, keys = OF_GROUPS.digest, b"".join(map(key_of, range(4)))
    scopes = {
        digest + SLOT_BYTES.to_bytes(8, "little"): 4,
        digest: 0,  # of an engine that knows one length alone
        digest + (1 << 40).to_bytes(8, "little"): 0,
        digest + b"\0": 0,
        digest + b"\1": 0,
    }
    for scope, count in scopes.items():
        client.send_multipart([b"find", bytes(8), scope, keys])
        assert client.poll(int(DEADLINE_S * 1000))
        assert client.recv_multipart() == [b"found", bytes(8), count.to_bytes(4, "little")]
        client.send_multipart([b"load", bytes(8), scope, keys])
        replies = [client.recv_multipart() for _ in range(count + 1) if client.poll(int(DEADLINE_S * 1000))]
        assert [reply[0] for reply in replies] == [b"block"] * count + [b"end"]


def test_engines_with_blocks_of_one_length_speak_as_those_of_earlier_versions(net: Net) -> None:
    heard = list[list[bytes]]()

    def answer(frames: list[bytes]) -> list[bytes]:
        heard.append(frames)
        return [b"found", frames[1], b"\4\0\0\0"] if frames[0] == b"find" else [b"end", frames[1]]

    net.answer_all(answer)
    source = net.source()
    assert find(source, range(4)) == 4 and load(source, range(4)) == [False] * 4
    keys = b"".join(map(key_of, range(4)))
    assert [[verb, *rest] for verb, _, *rest in heard] == [
        [b"find", NAMESPACE.digest, keys],
        [b"load", NAMESPACE.digest, keys],
    ]


def test_an_address_in_use_is_the_operators_error(net: Net) -> None:
    for address in ("", "tcp://127.0.0.1:0"):
        server = net.serve(Host([]), address)
        with pytest.raises(ConfigError, match="--kv-listen"):
            Host([]).serve(server.address)


# ── strangers and liars ──────────────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_without_the_secret_cannot_connect(net: Net) -> None:
    host = Host(filled(range(4)))
    address = net.serve(host, "tcp://127.0.0.1:0", SECRET).address
    for namespace in (NAMESPACE, SIGNED._replace(secret=b"another")):
        stranger = net.source(address, namespace=namespace)
        assert [find(stranger, range(4), SHORT_S) for _ in range(4)] == [0] * 4
        assert stranger.state().is_broken
    assert host.num_pins == 0
    source = net.source(address, namespace=SIGNED)
    wait_until(lambda: net.find_later(source, range(4)) == 4)


def test_a_client_that_knows_only_the_servers_key_is_refused(net: Net) -> None:
    host = Host(filled(range(1)))
    server = net.serve(host, "tcp://127.0.0.1:0", SECRET)
    socket = net.socket(zmq.DEALER)
    socket.curve_serverkey = peer_keys(SECRET).server_public.encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(server.address)
    socket.send_multipart([b"find", bytes(8), NAMESPACE.digest, key_of(0)])
    assert not socket.poll(300) and host.num_pins == 0


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_a_peer_that_sends_another_block_is_caught_and_not_used_for_long(net: Net, secret: bytes) -> None:
    form = net.serve(Host(filled(range(8))), secret=secret)._form
    assert form is not None
    honest = form.seal
    form.seal = lambda key, payload: honest(key_of(100), payload)  # type: ignore[method-assign]
    source = net.source(namespace=NAMESPACE._replace(secret=secret))
    for number in range(3):
        assert find(source, range(4)) == 4
        assert load(source, range(4)) == [False] * 4
        assert source.state().rejected == {"key": 4 * (number + 1)}
    assert find(source, range(4)) == 0 and source.state().is_broken


NONSENSE = [
    [b"found", b"serial", b"\xff\xff\xff\x7f"],
    [b"found", b"serial"],
    [b"found", b"another.", b"\x04\0\0\0"],
    [b"block", b"serial", b"\0\0\0\0", b"", b"", b""],
    [b"block", b"serial", b"\xff\xff\xff\xff", b"", b"", b""],
    [b"block", b"serial", b"\0", b"", b"", b""],
    [b"block", b"another.", b"\0\0\0\0", b"", b"", bytes(SLOT_BYTES)],
    [b"end", b"another."],
    [b"noise"],
    [b""],
]


def test_a_peer_that_speaks_nonsense_is_a_miss(net: Net) -> None:
    for number, nonsense in enumerate(NONSENSE):
        sent = list[bytes]()

        def answer(frames: list[bytes], nonsense: list[bytes] = nonsense, sent: list[bytes] = sent) -> list[bytes]:
            verb, serial, *_ = frames
            if verb == b"find" and nonsense[0] != b"found":
                return [b"found", serial, b"\x04\0\0\0"]
            sent.append(serial)
            return [serial if part == b"serial" else part for part in nonsense]

        net.answer_all(answer, name := f"p{number}")
        source = net.source(net.address(name), silence_s=SHORT_S)
        while not sent:
            assert net.find_later(source, range(4), SHORT_S) <= 4
            assert load(source, range(4)) == [False] * 4
        assert find(source, range(4), SHORT_S) <= 4


# ── peers that fail ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:0"])
def test_a_frozen_peer_costs_three_timeouts_and_is_used_again(net: Net, address: str) -> None:
    process, address = net.start_process(8, address)
    source = net.source(address)
    wait_until(lambda: net.find_later(source, range(8)) == 8)
    freeze(process)
    num_before = source.state().num_failed
    assert load(source, range(8), SHORT_S) == [False] * 8
    assert [find(source, range(8), SHORT_S) for _ in range(30)] == [0] * 30
    assert source.state().num_failed == num_before + 3 and source.state().is_broken
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: net.find_later(source, range(8)) == 8)
    assert load(source, range(8)) == [True] * 8 and not source.state().is_broken


def test_a_peer_that_is_killed_amid_a_load_leaves_whole_blocks_only(net: Net) -> None:
    process, _ = net.start_process(400)
    source = net.source(silence_s=1.0)
    assert find(source, range(400)) == 400
    results: dict[int, bool] = {}
    items = empty(range(400))

    def on_loaded(index: int, is_good: bool) -> None:
        if not results:
            process.kill()
        assert index not in results
        results[index] = is_good
        assert not is_good or items[index].slot == content_of(key_of(index))

    source.load(items, time.monotonic() + DEADLINE_S, on_loaded)
    assert sorted(results) == list(range(400)) and True in results.values()
    process.wait(DEADLINE_S)
    assert find(source, range(400), SHORT_S) == 0
    net.start_process(5)
    wait_until(lambda: net.find_later(source, range(8)) == 5)


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "gone"])
def test_a_peer_that_is_silent_or_gone_delays_no_other(net: Net, is_silent: bool) -> None:
    if is_silent:
        net.socket(zmq.ROUTER).bind(net.address("bad"))
    net.serve(Host(filled(range(8))))
    source = net.source(net.address("bad"), net.address())
    deadline = Deadline(SOON_S)
    for _ in range(20):
        assert find(source, range(8)) == 8
    assert load(source, range(8)) == [True] * 8
    assert find(source, range(9), SHORT_S) == 8
    if not is_silent:
        lonely = net.source(net.address("bad"))
        assert [find(lonely, range(8)) for _ in range(9)] == [0] * 9 and lonely.state().is_broken
    assert not deadline.has_passed()


def test_silence_amid_a_load_ends_it_long_before_its_deadline(net: Net) -> None:
    process, _ = net.start_process(4)
    source = net.source(silence_s=SHORT_S)
    assert find(source, range(4)) == 4
    freeze(process)
    deadline = Deadline(SOON_S)
    assert load(source, range(4)) == [False] * 4
    assert not deadline.has_passed()


# ── clients that misbehave ───────────────────────────────────────────────────────────────────────────────────────────


def test_clients_that_flood_and_do_not_read_cost_bounded_memory_and_delay_no_other(net: Net) -> None:
    host, most_bytes = Host(filled(range(8))), 16 * SLOT_BYTES
    server = net.serve(host, load_bytes=8 * SLOT_BYTES, max_sending_bytes=most_bytes)
    flooder = net.socket(zmq.DEALER)
    flooder.setsockopt(zmq.RCVHWM, 1)
    flooder.connect(server.address)
    keys = b"".join(key_of(number) for number in range(8))
    for serial in range(3000):
        flooder.send_multipart([LOAD, serial.to_bytes(8), NAMESPACE.digest, keys])
    source, deadline = net.source(), Deadline(SOON_S)
    for _ in range(20):
        assert find(source, range(8)) == 8
        assert load(source, range(8)) == [True] * 8
        assert sum(transfer.num_bytes for transfer in server._transfers) <= most_bytes
        assert all(len(queue) <= peer_server.MAX_QUEUED for queue in list(server._queues.values()))
    assert not deadline.has_passed() and not +host.pins


BAD_REQUESTS = [
    [b"load"],
    [b"load", b"1", NAMESPACE.digest, bytes(32)],
    [b"load", bytes(8), NAMESPACE.digest, bytes(33)],
    [b"find", bytes(8), NAMESPACE.digest, b""],
    [b"find", bytes(8), b"", bytes(32)],
    [b"", b"", b"", b""],
    [b"unload", bytes(8), NAMESPACE.digest, bytes(32)],
    [bytes(32)] * 50,
]


def test_nonsense_of_a_client_is_skipped(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    server = net.serve(Host(filled(range(4))), disk=DiskOf(range(2)))
    client = net.socket(zmq.DEALER)
    client.connect(server.address)
    source = net.source()
    for frames in BAD_REQUESTS:
        for _ in range(10):
            client.send_multipart(frames)
        assert find(source, range(5)) == 4
        assert load(source, range(4)) == [True] * 4
    assert not caplog.records


def test_a_request_that_fails_does_not_end_the_service(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(filled(range(4)))
    net.serve(host)
    source = net.source()
    assert find(source, range(4)) == 4
    items, host.items = host.items, None  # type: ignore[assignment]
    assert find(source, range(4), SHORT_S) == 0
    host.items = items
    assert find(source, range(4)) == 4
    assert "failed" in caplog.text
