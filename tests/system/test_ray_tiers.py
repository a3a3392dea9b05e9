"""KV tiers of hosts that Ray has placed, each with an arena and a disk of its own: hits give the computed tokens. The
nodes have addresses of IPv6."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokenloom import Client, RequestOutput
from tokenloom.tests.support.ray_network import RayEngine, RayNetwork, obstacle
from tokenloom.tests.system.tier_engine import (
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

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be a cluster"),
    pytest.mark.timeout(280),
]

PROMPTS = new_prompts(4, 500, seed=23)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[RequestOutput]:
    return calm_answers(tmp_path_factory.mktemp("calm"), PROMPTS)


@pytest.fixture(scope="module")
def network() -> Iterator[RayNetwork]:
    """Two nodes, each with a folder of its own for blocks."""
    with RayNetwork(2, num_nodes=0, is_ipv6=True) as network:
        network.private.append(network.folder / "kv")
        for number in (0, 1):
            network.start_node(number)
        yield network


@pytest.fixture(scope="module")
def engine(network: RayNetwork) -> Iterator[RayEngine]:
    tiers = ["--kv-host-bytes", "16M", "--kv-disk", str(network.folder / "kv")]
    with RayEngine(network, *OVER_HOSTS, *tiers) as engine:
        engine.wait_ready()
        engine.wait_log("KV tiers opened", 2)
        yield engine
        engine.end()
        network.wait_none(1, "tokenloom", 5.0)


def test_evicted_blocks_come_back_from_the_slots_of_both_nodes(engine: RayEngine, calm: list[RequestOutput]) -> None:
    with Client(engine.address) as client:
        check_equal(calm, ask(client, PROMPTS), EQUAL_OVER_HOSTS)
        outputs = ask(client, PROMPTS)
    check_equal(calm, outputs, EQUAL_OVER_HOSTS)
    assert num_loaded(outputs, "host") >= num_readable(PROMPTS[0]) * 3


def test_after_the_loss_of_a_placed_host_blocks_come_back_from_the_disks_of_both_nodes(
    engine: RayEngine, network: RayNetwork, calm: list[RequestOutput]
) -> None:
    wait_parts([network.folder / "kv", network.folder / "kv-1"], PROMPTS)
    num_opened = engine.log().count("KV tiers opened")
    agent = network.wait_process(1, "tokenloom host")
    agent.kill()
    engine.wait_log(f"host {network.addresses[1]} is lost")
    engine.wait_log("KV tiers opened", num_opened + 2)
    with Client(engine.address, reconnect_timeout_s=DEADLINE_S) as client:
        outputs = load(client, PROMPTS)
    check_equal(calm, outputs, EQUAL_OVER_HOSTS)
    assert num_loaded(outputs, "disk") == sum(map(num_readable, PROMPTS))
