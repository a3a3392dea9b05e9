"""Replicas on hosts of their own: while a host is lost, requests go on at a replica that has its hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokenloom import RequestOutput
from tokenloom.tests.support.chaos_work import Work, check_equal
from tokenloom.tests.support.network_hosts import Agent, Network, SpreadEngine, obstacle
from tokenloom.tests.system.spread_work import EXACT, answers, calm, check_long, is_ready, work

__all__ = ["calm", "work"]  # fixtures
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("network"), 2) as network:
        yield network


@pytest.fixture(scope="module")
def agent(network: Network) -> Agent:
    return network.join(1)


@pytest.fixture(scope="module")
def engine(network: Network, agent: Agent) -> Iterator[SpreadEngine]:
    """One replica on the head, one on the other host."""
    with SpreadEngine(network, *EXACT, "--data-parallel-size", "2", "--hosts", "2") as engine:
        engine.wait_ready()
        yield engine
        engine.end()


def test_replicas_of_two_hosts_answer_as_one_process(
    engine: SpreadEngine, agent: Agent, work: list[Work], calm: list[RequestOutput]
) -> None:
    assert engine.find("worker 0") is not None and engine.find("worker 0 of replica 1") is None
    rank = agent.wait_rank()
    before_s = sum(rank.cpu_times()[:2])
    check_equal(calm, answers(engine.address, work))
    assert sum(rank.cpu_times()[:2]) - before_s > 0.1, "the replica on the other host had no work"


def test_requests_go_on_at_once_while_the_host_of_a_replica_is_lost(
    engine: SpreadEngine, network: Network, agent: Agent, work: list[Work], calm: list[RequestOutput]
) -> None:
    agent.wait_rank()
    check_long(engine, calm, agent.end)
    engine.wait_log("replicas [1] wait for 1 more host of 2")
    check_equal(calm, answers(engine.address, work))
    assert is_ready(engine)
    engine.child("worker 0").kill()
    engine.wait_log("supervisor: worker 0 is back")
    check_equal(calm, answers(engine.address, work))
    other = network.join(1)
    engine.wait_log("worker 0 of replica 1 is back")
    rank = other.wait_rank()
    before_s = sum(rank.cpu_times()[:2])
    check_equal(calm, answers(engine.address, work))
    assert sum(rank.cpu_times()[:2]) - before_s > 0.1, "the replica that is back had no work"
