"""The remote source and a cluster: each block lies on its node, and a node that a slot has left sends us on."""

from __future__ import annotations

import binascii
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.core.tiers.network.breaker import Breaker
from tokenloom.core.tiers.network.remote import RemoteSource
from tokenloom.tests.core.tiers.network.redis_server import RedisServer, free_port, needs_redis
from tokenloom.tests.core.tiers.slots import (
    NAMESPACE,
    filled,
    find,
    load,
    wait_for,
)
from tokenloom.tests.support.waiting import wait_until

pytestmark = needs_redis

NUM_SLOTS = 16384


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Three nodes, each with a third of the slots."""
    servers, bus_ports = list[RedisServer](), [free_port() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for number in range(3):
            options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"]
            options += ["--cluster-config-file", f"nodes-{number}.conf", "--cluster-port", str(bus_ports[number])]
            servers.append(RedisServer(tmp_path, *options))
            stack.callback(servers[-1].close)
        bounds = [number * NUM_SLOTS // 3 for number in range(4)]
        for server, low, high in zip(servers, bounds, bounds[1:], strict=False):
            assert server.ask(b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % low, b"%d" % (high - 1)) == b"OK"
        for server, bus_port in zip(servers[1:], bus_ports[1:], strict=True):
            words = (b"127.0.0.1", b"%d" % server.port, b"%d" % bus_port)
            assert servers[0].ask(b"CLUSTER", b"MEET", *words) == b"OK"
        for server in servers:
            wait_until(lambda server=server: b"cluster_state:ok" in (server.ask(b"CLUSTER", b"INFO") or b""))  # type: ignore[misc]
        yield servers


@pytest.fixture
def source(cluster: list[RedisServer]) -> Iterator[RemoteSource]:
    source = RemoteSource(cluster[0].url, lambda: None, lambda: Breaker(first_period_s=0.1))
    source.open(NAMESPACE)
    wait_for(source, lambda state: state.is_open)
    yield source
    source.close()


def test_blocks_are_spread_over_the_nodes_and_found_again(cluster: list[RedisServer], source: RemoteSource) -> None:
    assert find(source, range(40)) == 0
    assert source.store(filled(range(40))) == [True] * 40
    assert all(len(server.names()) >= 5 for server in cluster)
    assert find(source, range(50)) == 40
    assert load(source, range(42)) == [True] * 40 + [False] * 2
    assert source.state().num_failed == 0
    source.clear()
    assert not any(server.names() for server in cluster)


def give_slots(cluster: list[RedisServer], names: list[bytes], home: bytes) -> None:
    """Let the nodes of `cluster` take the node `home`, the first of them, for the place of these values."""
    for slot in {binascii.crc_hqx(name, 0) % NUM_SLOTS for name in names}:
        for server in cluster:
            assert server.ask(b"CLUSTER", b"SETSLOT", b"%d" % slot, b"NODE", home) == b"OK"
    cluster[0].ask(b"CLUSTER", b"BUMPEPOCH")  # the change wins over news of other nodes


def test_slots_that_move_are_followed(cluster: list[RedisServer], source: RemoteSource) -> None:
    source.store(filled(range(40)))
    home = cluster[0].ask(b"CLUSTER", b"MYID")
    assert isinstance(home, bytes)
    names = cluster[2].names()
    cluster[2].ask(b"FLUSHALL")
    give_slots(cluster, names, home)
    results = load(source, range(40))
    assert True in results and False in results
    wait_until(lambda: source.store(filled(range(40))) == [True] * 40)
    assert not cluster[2].names()
    assert load(source, range(40)) == [True] * 40


def test_a_lost_node_is_a_miss_of_all_and_the_rest_goes_on_after_it_is_back(
    cluster: list[RedisServer], source: RemoteSource
) -> None:
    source.store(filled(range(40)))
    cluster[1].kill()
    for _ in range(4):
        assert find(source, range(40), 1.0) < 40
        assert not all(load(source, range(40), 1.0))
    cluster[1].start()
    wait_until(lambda: source.store(filled(range(40))) == [True] * 40)
    assert load(source, range(40)) == [True] * 40


def test_slots_of_a_lost_node_are_found_at_its_successor(cluster: list[RedisServer], source: RemoteSource) -> None:
    source.store(filled(range(40)))
    home, names = cluster[0].ask(b"CLUSTER", b"MYID"), cluster[1].names()
    assert isinstance(home, bytes) and names
    cluster[1].kill()
    assert find(source, range(40), 1.0) < 40
    give_slots([cluster[0], cluster[2]], names, home)
    wait_until(lambda: source.store(filled(range(40))) == [True] * 40)
    assert load(source, range(40)) == [True] * 40
