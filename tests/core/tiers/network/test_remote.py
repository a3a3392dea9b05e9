"""The remote source against a real server: stored blocks come back whole or are a miss; nothing ever raises."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenloom.core.tiers.network.breaker import FIRST_PERIOD_S, Breaker
from tokenloom.core.tiers.network.remote import AHEAD_BYTES, RemoteSource
from tokenloom.core.tiers.object_format import HEADER_BYTES
from tokenloom.core.tiers.source import Namespace
from tokenloom.ipc.errors import ConfigError
from tokenloom.tests.core.tiers.network.redis_server import RedisServer, free_port, needs_redis
from tokenloom.tests.core.tiers.network.tcp_proxy import Proxy, ScriptedServer, in_pieces
from tokenloom.tests.core.tiers.slots import (
    DEADLINE_S,
    NAMESPACE,
    SIGNED,
    SLOT_BYTES,
    filled,
    find,
    key_of,
    load,
    wait_for,
)
from tokenloom.tests.support.waiting import Deadline, wait_until

pytestmark = needs_redis

SHORT_S = 0.3  # a deadline that a test waits for
NewSource = Callable[..., RemoteSource]
Closing = Callable[[Any], Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with contextlib.closing(RedisServer(tmp_path_factory.mktemp("r"))) as server:
        yield server


@pytest.fixture
def closing() -> Iterator[Closing]:
    """Close all that the test opens, at its end."""
    with contextlib.ExitStack() as stack:
        yield lambda opened: stack.enter_context(contextlib.closing(opened))


@pytest.fixture
def own_server(tmp_path: Path, closing: Closing) -> RedisServer:
    """A server that the test may stop."""
    server: RedisServer = closing(RedisServer(tmp_path))
    return server


@pytest.fixture
def new_source(server: RedisServer, closing: Closing) -> NewSource:
    """Open sources. The server is empty at first."""
    server.ask(b"FLUSHALL")

    def open_source(
        url: str = "", namespace: Namespace = NAMESPACE, waits: bool = True, **options: object
    ) -> RemoteSource:
        source: RemoteSource = closing(
            RemoteSource(url or server.unix_url, lambda: None, lambda: Breaker(**options))  # type: ignore[arg-type]
        )
        source.open(namespace)
        if waits:
            wait_for(source, lambda state: state.is_open)
        return source

    return open_source


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The warnings that sources log."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tokenloom.tiers").addHandler(handler)
    yield found
    logging.getLogger("tokenloom.tiers").removeHandler(handler)


def name_of(number: int) -> bytes:
    return f"kv:{NAMESPACE.digest[:8].hex()}:{key_of(number).hex()}".encode()


# ── stored blocks come back ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("namespace", [NAMESPACE, SIGNED])
@pytest.mark.parametrize("is_unix", [True, False])
def test_blocks_that_one_engine_stores_another_finds_and_loads(
    server: RedisServer, new_source: NewSource, is_unix: bool, namespace: Namespace
) -> None:
    url = server.unix_url if is_unix else server.url.replace("redis://", "valkey://")
    writer, reader = new_source(url, namespace), new_source(url, namespace)
    assert find(reader, range(100)) == 0
    assert writer.store(filled(range(90))) == [True] * 90
    assert find(reader, range(100)) == 90
    assert find(reader, range(200, 210)) == 0
    assert load(reader, range(85, 95)) == [True] * 5 + [False] * 5
    assert load(reader, range(90)) == [True] * 90
    state = reader.state()
    assert (state.num_read, state.num_failed, state.rejected) == (95, 0, {})
    assert (writer.state().num_written, writer.state().num_dropped) == (90, 0)
    assert writer.state().written_bytes == 90 * len(server.ask(b"GET", name_of(0)) or b"")  # type: ignore[arg-type]


def test_blocks_that_are_here_are_not_sent_again(new_source: NewSource) -> None:
    source = new_source()
    source.store(filled(range(4)))
    assert source.store(filled(range(6))) == [True] * 6
    assert source.state().num_written == 6


def test_engines_of_another_namespace_or_secret_find_nothing_of_ours(new_source: NewSource) -> None:
    new_source(namespace=SIGNED).store(filled(range(4)))
    assert find(new_source(namespace=SIGNED._replace(digest=bytes(32))), range(4)) == 0
    assert find(new_source(namespace=NAMESPACE), range(4)) == 0  # their objects have another length


def test_clear_removes_the_objects_of_the_namespace_and_no_others(server: RedisServer, new_source: NewSource) -> None:
    source = new_source()
    source.store(filled(range(20)))
    others = [b"kv:other%d" % number for number in range(3000)]  # more than one page of SCAN
    server.ask(b"MSET", *(word for name in others for word in (name, b"value")))
    source.clear()
    assert server.names() == sorted(others)


def test_another_namespace_replaces_the_one_before(new_source: NewSource) -> None:
    source = new_source()
    source.store(filled(range(4)))
    source.open(NAMESPACE._replace(digest=bytes(32)))
    assert find(source, range(4)) == 0
    source.open(NAMESPACE)
    assert find(source, range(4)) == 4


def test_a_password_is_given_and_a_wrong_one_is_a_miss(tmp_path: Path, new_source: NewSource, closing: Closing) -> None:
    locked = closing(RedisServer(tmp_path, password="sesame"))
    source = new_source(locked.url)
    assert source.store(filled(range(3))) == [True] * 3
    assert load(new_source(locked.unix_url), range(3)) == [True] * 3
    wrong = new_source(locked.url.replace("sesame", "wrong"), waits=False)
    state = wait_for(wrong, lambda state: bool(state.error))
    assert "password" in state.error and "sesame" not in state.error
    assert [find(wrong, range(3)) for _ in range(5)] == [0] * 5
    assert wrong.store(filled(range(3))) == [False] * 3
    assert load(wrong, range(3)) == [False] * 3
    assert wrong.state().is_broken


def test_tls_protects_the_connection_and_an_unknown_certificate_is_refused(
    tmp_path: Path, new_source: NewSource, closing: Closing
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", *kind, *subject, *files], check=True, capture_output=True)
    port = free_port()
    options = ["--tls-port", str(port), "--port", "0", "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    try:
        closing(RedisServer(tmp_path, *options, "--tls-auth-clients", "no", port=port))
    except AssertionError:
        pytest.skip("this build of the server has no TLS")
    url = f"rediss://127.0.0.1:{port}/0"
    source = new_source(f"{url}?ssl_ca_certs={certificate}", SIGNED)
    assert source.store(filled(range(40))) == [True] * 40
    assert load(source, range(40)) == [True] * 40
    stranger = new_source(url, SIGNED, waits=False)
    assert "certificate" in wait_for(stranger, lambda state: bool(state.error)).error
    assert find(stranger, range(40)) == 0


def test_an_invalid_url_is_the_operators_error_and_shows_no_password() -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteSource("redis://:secret@127.0.0.1:6379/0?socket_timeout=soon", lambda: None)
    assert "127.0.0.1" in str(caught.value) and "secret" not in str(caught.value)


# ── damaged and foreign objects ──────────────────────────────────────────────────────────────────────────────────────


def flip(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :]


@pytest.mark.parametrize("namespace", [NAMESPACE, SIGNED])
@pytest.mark.parametrize(
    ("reason", "damage"),
    [
        ("checksum", lambda value, other: flip(value, HEADER_BYTES + 5000)),
        ("checksum", lambda value, other: flip(value, HEADER_BYTES - 40)),
        ("version", lambda value, other: flip(value, 9)),
        ("key", lambda value, other: other),
        ("length", lambda value, other: value[:-1]),
        ("length", lambda value, other: value + b"more"),
        ("length", lambda value, other: b""),
        ("type", None),
    ],
)
def test_a_damaged_object_is_not_loaded_but_deleted_and_counted(
    server: RedisServer,
    new_source: NewSource,
    namespace: Namespace,
    reason: str,
    damage: Callable[[bytes, bytes], bytes] | None,
) -> None:
    source = new_source(namespace=namespace)
    source.store(filled(range(8)))
    value, other = server.ask(b"GET", name_of(3)), server.ask(b"GET", name_of(4))
    assert isinstance(value, bytes) and isinstance(other, bytes)
    if damage is None:
        server.ask(b"DEL", name_of(3))
        server.ask(b"LPUSH", name_of(3), b"an element")
    else:
        server.ask(b"SET", name_of(3), damage(value, other))
    assert load(source, range(8)) == [True] * 3 + [False] + [True] * 4
    assert source.state().rejected == {reason: 1}
    assert name_of(3) not in server.names()
    assert not source.state().is_broken
    assert source.store(filled([3])) == [True]
    assert load(source, range(8)) == [True] * 8


def test_a_lookup_ends_at_a_value_of_another_length_and_the_next_store_replaces_it(
    server: RedisServer, new_source: NewSource
) -> None:
    source = new_source()
    source.store(filled(range(8)))
    server.ask(b"SETRANGE", name_of(5), b"%d" % (HEADER_BYTES + SLOT_BYTES), b"x")
    assert find(source, range(8)) == 5
    assert source.store(filled(range(8))) == [True] * 8
    assert find(source, range(8)) == 8 and load(source, range(8)) == [True] * 8


# ── failing servers ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_frozen_server_costs_three_timeouts_and_is_used_again_when_it_goes_on(
    own_server: RedisServer, new_source: NewSource, warnings: list[str]
) -> None:
    now, found = [0.0], list[int]()
    source = new_source(own_server.url, clock=lambda: now[0])
    source.store(filled(range(4)))
    own_server.freeze()

    def ask() -> None:
        found.extend(find(source, range(4), SHORT_S) for _ in range(20))

    ask()
    assert source.state().num_failed == 3
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == [0] * 100 and source.state().num_failed == 3
    assert source.state().is_broken and load(source, range(4)) == [False] * 4
    assert source.store(filled(range(4))) == [False] * 4
    own_server.thaw()
    now[0] += FIRST_PERIOD_S
    assert find(source, range(4)) == 4
    assert load(source, range(4)) == [True] * 4 and not source.state().is_broken
    assert len(warnings) == 1 and "not used for now" in warnings[0]


def test_a_killed_server_is_a_miss_and_is_used_again_after_its_restart(
    own_server: RedisServer, new_source: NewSource
) -> None:
    source = new_source(own_server.url, first_period_s=0.1)
    source.store(filled(range(4)))
    own_server.kill()
    assert [find(source, range(4)) for _ in range(5)] == [0] * 5
    assert source.state().is_broken
    own_server.start()
    wait_until(lambda: source.store(filled(range(4))) == [True] * 4)
    assert load(source, range(4)) == [True] * 4


def test_a_server_that_restarts_between_two_requests_costs_no_failure(
    own_server: RedisServer, new_source: NewSource
) -> None:
    source = new_source(own_server.url)
    source.store(filled(range(4)))
    own_server.kill()
    own_server.start()
    assert source.store(filled(range(4))) == [True] * 4
    assert source.state().num_failed == 0


@pytest.mark.parametrize("size", [1, 7, 4099])
def test_replies_in_odd_pieces_are_read_whole(
    server: RedisServer, new_source: NewSource, size: int, closing: Closing
) -> None:
    proxy = closing(Proxy(("127.0.0.1", server.port), to_client=in_pieces(size)))
    source = new_source(proxy.url, SIGNED)
    assert source.store(filled(range(3))) == [True] * 3
    assert find(source, range(5)) == 3
    assert load(source, [0, 7, 1, 2, 8]) == [True, False, True, True, False]


def test_values_are_asked_for_ahead_up_to_a_limit(server: RedisServer, new_source: NewSource, closing: Closing) -> None:
    num_asked = num_forwarded = most = 0

    def count_asked(data: bytes) -> Iterator[bytes]:
        nonlocal num_asked, most
        num_asked += data.count(b"GET\r\n")
        most = max(most, num_asked - num_forwarded // (HEADER_BYTES + SLOT_BYTES))
        yield data

    def count_forwarded(data: bytes) -> Iterator[bytes]:
        nonlocal num_forwarded
        num_forwarded += len(data)  # before they arrive: too early rather than too late
        yield data

    numbers = range(150)
    assert all(new_source(server.url).store(filled(numbers)))
    proxy = closing(Proxy(("127.0.0.1", server.port), count_asked, count_forwarded))
    assert load(new_source(proxy.url), numbers) == [True] * len(numbers)
    assert num_asked == len(numbers) and 1 < most <= AHEAD_BYTES // SLOT_BYTES


def test_a_server_that_dies_amid_a_value_leaves_the_blocks_before_it(
    own_server: RedisServer, new_source: NewSource, closing: Closing
) -> None:
    num_bytes = 0

    def kill_amid(data: bytes) -> Iterator[bytes]:
        nonlocal num_bytes
        for piece in in_pieces(1000)(data):
            num_bytes += len(piece)
            if num_bytes > 2.5 * (HEADER_BYTES + SLOT_BYTES):
                own_server.kill()
                raise OSError
            yield piece

    new_source(own_server.url).store(filled(range(8)))
    proxy = closing(Proxy(("127.0.0.1", own_server.port), to_client=kill_amid))
    source = new_source(proxy.url)
    results = load(source, range(8))
    assert results == [True] * 2 + [False] * 6
    assert source.state().num_failed == 1


def test_a_value_that_stops_half_way_ends_at_the_deadline(
    server: RedisServer, new_source: NewSource, closing: Closing
) -> None:
    num_bytes, has_stopped, goes_on = 0, threading.Event(), threading.Event()

    def stop_amid(data: bytes) -> Iterator[bytes]:
        nonlocal num_bytes
        num_bytes += len(data)
        if num_bytes > 3 * SLOT_BYTES and not has_stopped.is_set():
            has_stopped.set()
            yield data[:100]
            goes_on.wait(DEADLINE_S)
            data = data[100:]
        yield data

    new_source().store(filled(range(8)))
    proxy = closing(Proxy(("127.0.0.1", server.port), to_client=stop_amid))
    source = new_source(proxy.url)
    deadline = Deadline(DEADLINE_S / 2)
    results = load(source, range(8), SHORT_S)
    assert not deadline.has_passed()
    assert results == sorted(results, reverse=True) and not all(results)
    assert load(source, range(8)) == [True] * 8  # on a new connection: the first one still stands still
    goes_on.set()
    assert load(source, range(8)) == [True] * 8


def test_a_slow_store_delays_no_load(server: RedisServer, new_source: NewSource, closing: Closing) -> None:
    is_slow, goes_on = threading.Event(), threading.Event()

    def hold_stores(data: bytes) -> Iterator[bytes]:
        if b"SET\r\n" in data:
            is_slow.set()
            goes_on.wait(DEADLINE_S)
        yield data

    new_source().store(filled(range(4)))
    proxy = closing(Proxy(("127.0.0.1", server.port), to_server=hold_stores))
    source = new_source(proxy.url)
    stored: list[bool] = []
    thread = threading.Thread(target=lambda: stored.extend(source.store(filled(range(50, 54)))))
    thread.start()
    assert is_slow.wait(DEADLINE_S)
    assert find(source, range(8)) == 4 and load(source, range(4)) == [True] * 4
    assert not stored
    goes_on.set()
    thread.join(DEADLINE_S)
    assert stored == [True] * 4


def test_a_full_server_drops_stores_and_counts_them_with_one_line(
    tmp_path: Path, new_source: NewSource, warnings: list[str], closing: Closing
) -> None:
    full = closing(RedisServer(tmp_path, "--maxmemory", "1500kb", "--maxmemory-policy", "noeviction"))
    source = new_source(full.url)
    results = [is_stored for first in range(0, 64, 8) for is_stored in source.store(filled(range(first, first + 8)))]
    num_dropped = results.count(False)
    assert 0 < num_dropped < 64
    assert source.state().num_dropped == num_dropped and not source.state().is_broken
    assert load(source, range(64)) == results
    assert len(warnings) == 1 and "OOM" in warnings[0]


ODD_ANSWERS = {
    "loading": b"-LOADING wait\r\n",
    "replica": b"-READONLY a replica\r\n",
    "moved": b"-MOVED 1 127.0.0.1:1\r\n",
    "ask": b"-ASK 1 127.0.0.1:1\r\n",
    "unknown": b"-ERR unknown command\r\n",
    "no login": b"-NOAUTH log in\r\n",
    "missing": b"$-1\r\n",
    "nested": b"*1\r\n" * 3000,
    "null array": b"*-1\r\n",
    "long": b"$99999999999\r\n",
    "no length": b"$x\r\n",
    "no number": b":\r\n",
    "no end": b"+" + b"x" * 20000,
    "noise": b"\x00\xff" * 5000,
    "http": b"HTTP/1.1 200 OK\r\n\r\n",
    "too long": b"$3\r\nabcdef\r\n",
    "negative": b":-1\r\n" * 100,
    "long array": b"*1000000000\r\n",
    "map": b"%1\r\n+a\r\n+b\r\n",
}


@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
def test_an_odd_answer_is_a_miss(new_source: NewSource, answer: bytes, closing: Closing) -> None:
    scripted = closing(ScriptedServer(answer * 16))
    source = new_source(scripted.url)
    for _ in range(2):
        assert find(source, range(4), SHORT_S) == 0
        assert load(source, range(4), SHORT_S) == [False] * 4
    assert source.store(filled(range(4))) == [False] * 4
    source.clear()
