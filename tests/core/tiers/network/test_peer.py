"""Engines that load blocks from each other: content arrives whole or not at all, and no engine harms another."""

from __future__ import annotations

import contextlib
import hashlib
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

from tokenloom.core.tiers.network import peer, peer_server
from tokenloom.core.tiers.network.breaker import Breaker
from tokenloom.core.tiers.network.peer import PeerSource
from tokenloom.core.tiers.network.peer_server import LOAD, PeerServer, peer_keys
from tokenloom.core.tiers.source import Item, Namespace
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.tier import SourceState
from tokenloom.tests.core.tiers.network.blocks import (
    DEADLINE_S,
    NAMESPACE,
    SECRET,
    SIGNED,
    SLOT_BYTES,
    content_of,
    filled,
    find,
    key_of,
    load,
    wait_until,
)
from tokenloom.tests.core.tiers.network.peer_host import Host

SHORT_S = 0.3


class DiskOf:
    """A disk source with these blocks."""

    name = "disk"
    num_loaders = load_batch = store_batch = 1

    def __init__(self, numbers: Sequence[int]) -> None:
        self._keys = {key_of(number) for number in numbers}

    def open(self, namespace: Namespace) -> None: ...

    def find(self, keys: Sequence[bytes], deadline: float) -> int:
        return next((n for n, key in enumerate(keys) if key not in self._keys), len(keys))

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
        for index, item in enumerate(items):
            if item.key in self._keys:
                item.slot[:] = content_of(item.key)
            on_loaded(index, item.key in self._keys)

    def store(self, items: Sequence[Item]) -> list[bool]:
        return [False] * len(items)

    def clear(self) -> None: ...

    def state(self) -> SourceState:
        return SourceState(name="disk")

    def close(self) -> None: ...


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def new_source(
    stack: contextlib.ExitStack, *addresses: str, namespace: Namespace = NAMESPACE, period_s: float = 5.0
) -> PeerSource:
    source = PeerSource(addresses, lambda: None, lambda: Breaker(first_period_s=period_s))
    stack.callback(source.close)
    source.open(namespace)
    return source


def serve(
    stack: contextlib.ExitStack, host: Host, address: str, secret: bytes = b"", disk: object = None
) -> PeerServer:
    server = host.serve(address, secret, disk)  # type: ignore[arg-type]
    stack.callback(server.close)
    return server


def start_process(stack: contextlib.ExitStack, address: str, count: int) -> tuple[subprocess.Popen[str], str]:
    """Start an engine with blocks 0 … count - 1; return its process and address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenloom.tests.core.tiers.network.peer_host", address, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    for file in (process.stdin, process.stdout):
        stack.callback(file.close)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process, process.stdout.readline().strip()


# ── blocks of a peer arrive ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("is_tcp", [False, True])
def test_blocks_of_host_and_disk_are_found_and_loaded(
    stack: contextlib.ExitStack, tmp_path: Path, is_tcp: bool, secret: bytes
) -> None:
    host = Host(filled([*range(10), *range(20, 30)]))
    server = serve(stack, host, "tcp://127.0.0.1:0" if is_tcp else f"ipc://{tmp_path}/p", secret, DiskOf(range(10, 25)))
    source = new_source(stack, server.address, namespace=NAMESPACE._replace(secret=secret))
    assert find(source, range(50)) == 30
    assert find(source, range(40, 50)) == 0
    assert load(source, range(30)) == [True] * 30
    state = source.state()
    assert (state.num_read, state.num_failed, state.rejected) == (30, 0, {})
    assert not +host.pins and host.num_pins >= 3
    assert source.store(filled(range(3))) == [False] * 3


def test_the_peer_with_the_longest_run_is_asked(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    hosts = [Host(filled(range(count))) for count in (3, 9, 6)]
    servers = [serve(stack, host, f"ipc://{tmp_path}/{number}") for number, host in enumerate(hosts)]
    source = new_source(stack, *(server.address for server in servers))
    assert find(source, range(12)) == 9
    assert load(source, range(9)) == [True] * 9
    assert [host.num_pins for host in hosts] == [1, 2, 1]


def test_many_blocks_come_in_several_requests(
    stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "LOAD_BYTES", 3 * SLOT_BYTES)
    monkeypatch.setattr(peer_server, "MAX_SENDING_BYTES", 12 * SLOT_BYTES)
    host = Host(filled(range(40)))
    source = new_source(stack, serve(stack, host, f"ipc://{tmp_path}/p").address)
    assert find(source, range(40)) == 40
    assert load(source, range(40)) == [True] * 40
    assert host.num_pins == 1 + 14


def test_a_block_that_has_left_the_peer_is_a_miss(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    host = Host(filled(range(8)))
    source = new_source(stack, serve(stack, host, f"ipc://{tmp_path}/p").address)
    assert find(source, range(8)) == 8
    del host.items[5]
    assert load(source, range(8)) == [True] * 5 + [False] + [True] * 2
    assert source.state().num_failed == 0 and not +host.pins


def test_an_engine_of_another_namespace_gets_nothing(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    host = Host(filled(range(4)))
    server = serve(stack, host, f"ipc://{tmp_path}/p")
    source = new_source(stack, server.address, namespace=NAMESPACE._replace(digest=bytes(32)))
    assert find(source, range(4)) == 0 and host.num_pins == 0
    source.open(NAMESPACE)
    assert find(source, range(4)) == 4
    server.open(NAMESPACE._replace(digest=bytes(32)))
    assert load(source, range(4)) == [False] * 4


def test_an_address_in_use_is_the_operators_error(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    for address in (f"ipc://{tmp_path}/p", "tcp://127.0.0.1:0"):
        server = serve(stack, Host([]), address)
        with pytest.raises(ConfigError, match="--kv-listen"):
            Host([]).serve(server.address)


# ── strangers and liars ──────────────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_without_the_secret_cannot_connect(stack: contextlib.ExitStack) -> None:
    host = Host(filled(range(4)))
    server = serve(stack, host, "tcp://127.0.0.1:0", SECRET)
    for namespace in (NAMESPACE, SIGNED._replace(secret=b"another")):
        stranger = new_source(stack, server.address, namespace=namespace)
        assert [find(stranger, range(4), SHORT_S) for _ in range(4)] == [0] * 4
        assert stranger.state().is_broken
    assert host.num_pins == 0
    assert find(new_source(stack, server.address, namespace=SIGNED), range(4)) == 4


def test_a_client_that_knows_only_the_servers_key_is_refused(stack: contextlib.ExitStack) -> None:
    host = Host(filled(range(1)))
    server = serve(stack, host, "tcp://127.0.0.1:0", SECRET)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey = peer_keys(SECRET).server_public.encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(server.address)
    socket.send_multipart([b"find", bytes(8), NAMESPACE.digest, key_of(0)])
    assert not socket.poll(300) and host.num_pins == 0
    context.destroy(linger=0)


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_a_peer_that_sends_another_block_is_caught_and_not_used_for_long(
    stack: contextlib.ExitStack, tmp_path: Path, secret: bytes
) -> None:
    host = Host(filled(range(8)))
    server = serve(stack, host, f"ipc://{tmp_path}/p", secret)
    form = server._form
    assert form is not None
    honest = form.seal
    form.seal = lambda key, payload: honest(key_of(100), payload)  # type: ignore[method-assign]
    source = new_source(stack, server.address, namespace=NAMESPACE._replace(secret=secret))
    for number in range(3):
        assert find(source, range(4)) == 4
        assert load(source, range(4)) == [False] * 4
        assert source.state().rejected == {"key": 4 * (number + 1)}
    assert find(source, range(4)) == 0 and source.state().is_broken


def test_damaged_blocks_of_a_peer_are_refused(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    server = serve(stack, Host(filled(range(6))), f"ipc://{tmp_path}/p", SECRET)
    form = server._form
    assert form is not None
    honest, damage = form.seal, iter(["", "mac", "checksum", "version", "length", ""])

    def seal(key: bytes, payload: memoryview) -> tuple[bytes, bytes]:
        head, tail = honest(key, payload)
        match next(damage):
            case "mac":
                return head, bytes(32)
            case "length":
                return head[:-1], tail
            case "version":
                return head[:8] + b"\x09" + head[9:], tail
            case "checksum":
                payload[100] ^= 1
        return head, tail

    form.seal = seal  # type: ignore[method-assign,assignment]
    source = new_source(stack, server.address, namespace=SIGNED)
    assert find(source, range(6)) == 6
    assert load(source, range(6)) == [True, False, False, False, False, True]
    assert source.state().rejected == {"mac": 1, "checksum": 1, "version": 1, "length": 1}


@pytest.mark.parametrize(
    "answer",
    [
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
    ],
)
def test_a_peer_that_speaks_nonsense_is_a_miss(
    stack: contextlib.ExitStack, tmp_path: Path, answer: list[bytes]
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(lambda: context.destroy(linger=0))
    router, goes_on = context.socket(zmq.ROUTER), threading.Event()
    stack.callback(router.close)
    router.bind(f"ipc://{tmp_path}/p")

    def run() -> None:
        while not goes_on.is_set():
            if router.poll(20):
                client, verb, serial, *_ = router.recv_multipart()
                if verb == b"find" and answer[0] != b"found":
                    router.send_multipart([client, b"found", serial, b"\x04\0\0\0"])
                else:
                    router.send_multipart([client, *(serial if part == b"serial" else part for part in answer)])

    thread = threading.Thread(target=run)
    thread.start()
    stack.callback(thread.join)
    stack.callback(goes_on.set)
    source = new_source(stack, f"ipc://{tmp_path}/p")
    for _ in range(4):
        assert find(source, range(4), SHORT_S) <= 4
        assert load(source, range(4), SHORT_S) == [False] * 4


# ── peers that fail ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_frozen_peer_costs_three_timeouts_and_is_used_again(
    stack: contextlib.ExitStack, tmp_path: Path, scheme: str
) -> None:
    process, address = start_process(stack, f"ipc://{tmp_path}/p" if scheme == "ipc" else "tcp://127.0.0.1:0", 8)
    source = new_source(stack, address, period_s=2.0)
    assert find(source, range(8)) == 8
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    started = time.monotonic()
    assert load(source, range(8), SHORT_S) == [False] * 8
    assert time.monotonic() - started < SHORT_S + 0.3
    num_slow = 1
    for _ in range(30):
        started = time.monotonic()
        assert find(source, range(8), SHORT_S) == 0
        num_slow += time.monotonic() - started > 0.5 * SHORT_S
    assert num_slow == 3 and source.state().is_broken
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: find(source, range(8), SHORT_S) == 8, 10)
    assert load(source, range(8)) == [True] * 8 and not source.state().is_broken


def test_a_peer_that_is_killed_amid_a_load_leaves_whole_blocks_only(
    stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    process, address = start_process(stack, f"ipc://{tmp_path}/p", 400)
    source = new_source(stack, address, period_s=0.1)
    assert find(source, range(400)) == 400
    results: dict[int, bool] = {}
    items = filled(range(400))
    for item in items:
        item.slot[:] = bytes(SLOT_BYTES)

    def on_loaded(index: int, is_good: bool) -> None:
        if not results:
            process.kill()
        assert index not in results
        results[index] = is_good
        assert not is_good or hashlib.sha256(items[index].slot).digest() == digest_of(index)

    source.load(items, time.monotonic() + 1.0, on_loaded)
    assert sorted(results) == list(range(400)) and True in results.values()
    assert find(source, range(400), SHORT_S) == 0
    process.wait(DEADLINE_S)
    start_process(stack, f"ipc://{tmp_path}/p", 5)
    wait_until(lambda: find(source, range(8), SHORT_S) == 5)


def digest_of(number: int) -> bytes:
    return hashlib.sha256(content_of(key_of(number))).digest()


def test_a_peer_that_is_gone_delays_no_other(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    server = serve(stack, Host(filled(range(8))), f"ipc://{tmp_path}/here")
    source = new_source(stack, f"ipc://{tmp_path}/gone", server.address)
    started = time.monotonic()
    for _ in range(20):
        assert find(source, range(8)) == 8
    assert time.monotonic() - started < 1
    assert find(source, range(9), SHORT_S) == 8
    assert load(source, range(8)) == [True] * 8
    lonely = new_source(stack, f"ipc://{tmp_path}/gone")
    started = time.monotonic()
    assert [find(lonely, range(8)) for _ in range(9)] == [0] * 9  # with a deadline of DEADLINE_S
    assert time.monotonic() - started < 2 and lonely.state().is_broken


def test_a_silent_peer_does_not_delay_the_answer_of_one_that_has_all(
    stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(lambda: context.destroy(linger=0))
    silent = context.socket(zmq.ROUTER)
    stack.callback(silent.close)
    silent.bind(f"ipc://{tmp_path}/silent")
    server = serve(stack, Host(filled(range(8))), f"ipc://{tmp_path}/here")
    source = new_source(stack, f"ipc://{tmp_path}/silent", server.address)
    started = time.monotonic()
    for _ in range(5):
        assert find(source, range(8)) == 8
    assert time.monotonic() - started < 1


def test_silence_amid_a_load_ends_it_long_before_its_deadline(
    stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "SILENCE_S", 0.1)
    process, address = start_process(stack, f"ipc://{tmp_path}/p", 4)
    source = new_source(stack, address)
    assert find(source, range(4)) == 4
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    started = time.monotonic()
    assert load(source, range(4)) == [False] * 4
    assert time.monotonic() - started < 2


# ── clients that misbehave ───────────────────────────────────────────────────────────────────────────────────────────


def test_clients_that_flood_and_do_not_read_cost_bounded_memory_and_delay_no_other(
    stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "LOAD_BYTES", 8 * SLOT_BYTES)
    monkeypatch.setattr(peer_server, "MAX_SENDING_BYTES", 16 * SLOT_BYTES)
    host = Host(filled(range(8)))
    server = serve(stack, host, f"ipc://{tmp_path}/p")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(lambda: context.destroy(linger=0))
    keys = b"".join(key_of(number) for number in range(8))
    flooder = context.socket(zmq.DEALER)
    stack.callback(lambda: flooder.close(linger=0))
    flooder.setsockopt(zmq.RCVHWM, 1)
    flooder.connect(server.address)
    for serial in range(3000):
        flooder.send_multipart([LOAD, serial.to_bytes(8), NAMESPACE.digest, keys])
    source = new_source(stack, server.address)
    for _ in range(20):
        started = time.monotonic()
        assert find(source, range(8)) == 8
        assert load(source, range(8)) == [True] * 8
        assert time.monotonic() - started < 1
        assert sum(transfer.num_bytes for transfer in server._transfers) <= 16 * SLOT_BYTES
        assert all(len(queue) <= peer_server.MAX_QUEUED for queue in list(server._queues.values()))
    assert not +host.pins


@pytest.mark.parametrize(
    "frames",
    [
        [b"load"],
        [b"load", b"1", NAMESPACE.digest, bytes(32)],
        [b"load", bytes(8), NAMESPACE.digest, bytes(33)],
        [b"find", bytes(8), NAMESPACE.digest, b""],
        [b"find", bytes(8), b"", bytes(32)],
        [b"", b"", b"", b""],
        [b"unload", bytes(8), NAMESPACE.digest, bytes(32)],
        [bytes(32)] * 50,
    ],
)
def test_nonsense_of_a_client_is_skipped(
    stack: contextlib.ExitStack, tmp_path: Path, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(stack, Host(filled(range(4))), f"ipc://{tmp_path}/p", disk=DiskOf(range(2)))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(lambda: context.destroy(linger=0))
    client = context.socket(zmq.DEALER)
    stack.callback(lambda: client.close(linger=0))
    client.connect(server.address)
    for _ in range(10):
        client.send_multipart(frames)
    source = new_source(stack, server.address)
    assert find(source, range(5)) == 4
    assert load(source, range(4)) == [True] * 4
    assert not caplog.records


def test_a_request_that_fails_does_not_end_the_service(
    stack: contextlib.ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(filled(range(4)))
    source = new_source(stack, serve(stack, host, f"ipc://{tmp_path}/p").address)
    assert find(source, range(4)) == 4
    items, host.items = host.items, None  # type: ignore[assignment]
    assert find(source, range(4), SHORT_S) == 0
    host.items = items
    assert find(source, range(4)) == 4
    assert "failed" in caplog.text
