"""Engines over several hosts share blocks through Redis and as peers: each host has the parts of its ranks there."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import Client, RequestOutput
from tokenloom.tests.core.tiers.network.redis_server import BINARY, needs_redis
from tokenloom.tests.support.network_hosts import Network, SpreadEngine, obstacle
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.tier_engine import (
    BLOCK_SIZE,
    DEADLINE_S,
    EQUAL_OVER_HOSTS,
    OVER_HOSTS,
    ask,
    calm_answers,
    check_equal,
    load,
    new_prompts,
    num_loaded,
    num_readable,
    wait_parts,
)

PROMPTS = new_prompts(4, 500, seed=22)
NUM_BLOCKS = sum(num_readable(prompt) for prompt in PROMPTS) // BLOCK_SIZE
REDIS_PORT, PEER_PORT = 6380, 7300

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can"),
    pytest.mark.timeout(280),
]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[RequestOutput]:
    return calm_answers(tmp_path_factory.mktemp("calm"), PROMPTS)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, 4) as network:
        yield network


@pytest.fixture
def ring(tmp_path: Path) -> list[str]:
    """The options of the secret that the engines share."""
    file = tmp_path / "ring.key"
    file.touch(0o600)
    file.write_text(secrets.token_hex(32))
    return ["--kv-key-file", str(file)]


def check_loaded(engine: SpreadEngine, place: str, calm: list[RequestOutput]) -> None:
    """Check that an engine with empty caches finds all blocks of the prompts in a place."""
    with Client(engine.address) as client:
        outputs = load(client, PROMPTS)
    check_equal(calm, outputs, EQUAL_OVER_HOSTS)
    assert num_loaded(outputs, place) == sum(map(num_readable, PROMPTS))


@needs_redis
def test_an_engine_finds_in_redis_what_another_one_over_hosts_has_computed(
    network: Network, ring: list[str], calm: list[RequestOutput]
) -> None:
    assert BINARY is not None
    command = [
        BINARY,
        "--save",
        "",
        "--port",
        str(REDIS_PORT),
        "--bind",
        network.addresses[2],
        "--protected-mode",
        "no",
    ]
    prefix = network.prefix(2)
    redis = subprocess.Popen([*prefix, *command, "--dir", str(network.folder)], stdout=subprocess.DEVNULL)
    client_command = [*prefix, "redis-cli", "-h", network.addresses[2], "-p", str(REDIS_PORT), "dbsize"]

    def num_objects() -> int:
        found = subprocess.run(client_command, capture_output=True, text=True).stdout.split()
        return int(found[-1]) if found and found[-1].isdecimal() else 0

    remote = ["--kv-remote", f"redis://{network.addresses[2]}:{REDIS_PORT}/0", *ring]
    network.join(1)
    try:
        with SpreadEngine(network, *OVER_HOSTS, *remote) as engine:
            engine.wait_ready()
            engine.wait_log("KV tiers opened", 2)
            with Client(engine.address) as client:

                def are_stored() -> bool:  # blocks are stored when they are seen again
                    check_equal(calm, ask(client, PROMPTS), EQUAL_OVER_HOSTS)
                    return num_objects() >= 2 * NUM_BLOCKS

                wait_until(are_stored, engine.log, DEADLINE_S)
            engine.end()
        with SpreadEngine(network, *OVER_HOSTS, *remote) as engine:
            engine.wait_ready()
            check_loaded(engine, "remote", calm)
            assert engine.stop() == 0
    finally:
        redis.kill()
        redis.wait()


def test_an_engine_finds_in_a_peer_over_hosts_what_that_has_computed(
    network: Network, ring: list[str], calm: list[RequestOutput]
) -> None:
    network.private.append(network.folder / "kv")
    disks = [network.folder / "kv", network.folder / "kv-1"]
    giving = ["--kv-disk", str(disks[0]), "--kv-listen", f"tcp://0.0.0.0:{PEER_PORT}", *ring]
    places = ",".join(f"tcp://{address}:{PEER_PORT}" for address in network.addresses[:2])
    network.join(1)
    network.join(3, head=2)
    with (
        SpreadEngine(network, *OVER_HOSTS, *giving) as giver,
        SpreadEngine(network, *OVER_HOSTS, "--kv-peers", places, *ring, head=2) as taker,
    ):
        giver.wait_ready()
        giver.wait_log("KV tiers opened", 2)
        with Client(giver.address) as client:
            check_equal(calm, ask(client, PROMPTS), EQUAL_OVER_HOSTS)
        wait_parts(disks, PROMPTS)
        taker.wait_ready()
        check_loaded(taker, "peer", calm)
        for engine in (taker, giver):
            engine.end()
