"""KV tiers of an engine over several hosts, each with an arena and a disk of its own: hits give the computed tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import Client, RequestOutput
from tokenloom.tests.support.network_hosts import Agent, Network, SpreadEngine, obstacle
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.tier_engine import (
    DEADLINE_S,
    EQUAL_OVER_HOSTS,
    GREEDY,
    OVER_HOSTS,
    ask,
    calm_answers,
    check_equal,
    load,
    new_prompts,
    num_loaded,
    num_readable,
    objects,
    wait_parts,
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can"),
    pytest.mark.timeout(240),
]

PROMPTS = new_prompts(4, 500, seed=21)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[RequestOutput]:
    return calm_answers(tmp_path_factory.mktemp("calm"), PROMPTS)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Hosts with addresses of IPv6."""
    with Network(tmp_path_factory.mktemp("network"), 3, is_ipv6=True) as network:
        network.private.append(network.folder / "kv")
        yield network


@pytest.fixture(scope="module")
def engine(network: Network) -> Iterator[SpreadEngine]:
    tiers = ["--kv-host-bytes", "16M", "--kv-disk", str(network.folder / "kv")]
    with SpreadEngine(network, *OVER_HOSTS, *tiers) as engine:
        network.join(1)
        engine.wait_ready()
        engine.wait_log("KV tiers opened", 2)
        yield engine
        engine.end()
    for agent in network.agents:
        agent.wait_none(agent.alive)


@pytest.fixture
def agent(engine: SpreadEngine, network: Network) -> Agent:
    """The agent that has a rank."""
    return network.wait_agent()


def test_evicted_blocks_come_back_from_the_slots_of_both_hosts(engine: SpreadEngine, calm: list[RequestOutput]) -> None:
    with Client(engine.address) as client:
        check_equal(calm, ask(client, PROMPTS), EQUAL_OVER_HOSTS)
        outputs = ask(client, PROMPTS)
    check_equal(calm, outputs, EQUAL_OVER_HOSTS)
    assert num_loaded(outputs, "host") >= num_readable(PROMPTS[0]) * 3


def test_when_a_host_is_replaced_its_slots_are_computed_again(
    engine: SpreadEngine, network: Network, agent: Agent, calm: list[RequestOutput]
) -> None:
    spare = network.join(3 - agent.number)
    engine.wait_log(f"host {spare.address} has joined")
    agent.end()
    agent.wait_none(agent.alive)
    engine.wait_log(f"host {agent.address} is lost")
    with Client(engine.address, reconnect_timeout_s=DEADLINE_S) as client:
        outputs = ask(client, PROMPTS)
        assert spare.rank() is not None
        assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS), "the lost host had a part of all"
        check_equal(calm, outputs, EQUAL_OVER_HOSTS)
        check_equal(calm, again := ask(client, PROMPTS), EQUAL_OVER_HOSTS)
    assert num_loaded(again, "host") > 0


def test_a_host_that_comes_back_has_its_part_of_the_blocks_on_its_own_disk(
    engine: SpreadEngine, network: Network, agent: Agent, calm: list[RequestOutput]
) -> None:
    wait_parts([network.folder / "kv", network.folder / f"kv-{agent.number}"], PROMPTS)
    num_lost = engine.log().count(f"host {agent.address} is lost")
    num_opened = engine.log().count("KV tiers opened")
    agent.end()
    engine.wait_log(f"host {agent.address} is lost", num_lost + 1)
    again = network.join(agent.number)
    engine.wait_log("KV tiers opened", num_opened + 2)
    again.wait_rank()
    with Client(engine.address, reconnect_timeout_s=DEADLINE_S) as client:
        wait_until(lambda: client.health().is_ready, timeout_s=DEADLINE_S)
        outputs = load(client, PROMPTS)
    check_equal(calm, outputs, EQUAL_OVER_HOSTS)
    assert num_loaded(outputs, "disk") == sum(map(num_readable, PROMPTS))


def test_a_replica_on_another_host_has_its_tiers_there(tmp_path: Path, calm: list[RequestOutput]) -> None:
    options = ["--dp", "2", "--hosts", "2", "--max-model-len", "600", "--dtype", "float32", "--num-kv-blocks", "41"]
    with Network(tmp_path, 2) as network:
        network.private.append(tmp_path / "kv")
        tiers = ["--kv-host-bytes", "16M", "--kv-disk", str(tmp_path / "kv")]
        with SpreadEngine(network, *options, *tiers, "--step-timeout-s", "60") as engine:
            agent = network.join(1)
            engine.wait_ready()
            engine.wait_log("KV tiers opened", 2)
            titles = [" ".join(each.cmdline()).strip() for each in agent.processes()]
            assert "tokenloom tier of host 1 of replica 1" in titles and engine.find("tier of replica 1") is None
            with Client(engine.address) as client:
                for _ in range(2):  # all at once, so that each replica gets some
                    outputs = client.generate(PROMPTS, GREEDY, use_tqdm=False)
                    check_equal(calm, outputs, EQUAL_OVER_HOSTS)
            assert num_loaded(outputs, "host") > 0
            assert objects(tmp_path / "kv-1" / "replica-1")
            assert engine.stop() == 0
        agent.wait_none(agent.alive)
