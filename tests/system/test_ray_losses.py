"""Answers stay those of one process when parts of a Ray cluster end or are cut off, and others take their places."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tokenloom import RequestOutput
from tokenloom.tests.support.chaos_work import Work, check_equal
from tokenloom.tests.support.network_hosts import DEADLINE_S
from tokenloom.tests.support.ray_network import RayEngine, RayNetwork, obstacle
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.spread_work import (
    EXACT,
    answers,
    calm,
    check_long,
    is_ready,
    work,
)

__all__ = ["calm", "work"]  # fixtures

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be a cluster"),
    pytest.mark.timeout(280),
]
TITLE = "tokenloom host"


WATCH = """
import sys, threading, ray
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
print("watches", flush=True)
while any(node["Alive"] for node in ray.nodes() if node["NodeManagerAddress"] == sys.argv[2]):
    threading.Event().wait(0.05)
print("dead", flush=True)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[RayNetwork]:
    with RayNetwork(3) as network:
        yield network


@pytest.fixture(scope="module")
def engine(network: RayNetwork) -> Iterator[RayEngine]:
    with RayEngine(network, *EXACT, "--tp", "2", "--hosts", "2") as engine:
        engine.wait_ready()
        yield engine
        engine.end()
        for number in (1, 2):
            network.wait_none(number, "tokenloom", 5.0)


@pytest.fixture
def host(engine: RayEngine, network: RayNetwork) -> int:
    """The host with the second rank. Before, links and nodes that the last test took are given back."""
    for number in (1, 2):
        network.heal(number)
        if not network.processes(number, "raylet"):
            network.end_node(number)
            network.start_node(number)
    network.wait_nodes(0, 1, 2)

    def found() -> list[int]:
        hosts = [number for number in (1, 2) if network.processes(number, "tokenloom worker 1")]
        return hosts if len(hosts) == 1 and is_ready(engine) else []

    return wait_until(found, "no host has a rank", DEADLINE_S)[0]


@pytest.mark.parametrize("victim", ["tokenloom worker 1", TITLE, "ray::AgentActor"])
def test_a_killed_process_of_a_host_changes_no_answer(
    engine: RayEngine, network: RayNetwork, host: int, calm: list[RequestOutput], victim: str
) -> None:
    found = network.wait_process(host, victim)
    check_long(engine, calm, found.kill)
    assert not found.is_running()


def test_a_killed_raylet_gives_its_place_to_another_node(
    engine: RayEngine, network: RayNetwork, host: int, calm: list[RequestOutput]
) -> None:
    raylet = network.wait_process(host, "raylet")

    def fault() -> None:
        raylet.kill()
        network.wait_none(host, "tokenloom", 10.0)

    check_long(engine, calm, fault)
    assert network.processes(3 - host, "tokenloom worker 1")


def test_a_killed_launcher_takes_its_agents_along_and_the_next_places_new_ones(
    engine: RayEngine, network: RayNetwork, host: int, calm: list[RequestOutput]
) -> None:
    launcher, agent = engine.child("launcher"), network.wait_process(host, TITLE)
    check_long(engine, calm, launcher.kill)
    assert engine.child("launcher").pid != launcher.pid and not agent.is_running()


def test_a_stopped_agent_is_replaced_and_does_not_outlive_its_place(
    engine: RayEngine, network: RayNetwork, host: int, calm: list[RequestOutput]
) -> None:
    agent = network.wait_process(host, TITLE)

    def fault() -> None:
        agent.send_signal(signal.SIGSTOP)
        network.wait_process(3 - host, TITLE)

    check_long(engine, calm, fault)
    network.wait_none(host, "tokenloom", 4.0)


def test_a_cut_link_is_noticed_long_before_ray_does(
    engine: RayEngine, network: RayNetwork, host: int, calm: list[RequestOutput]
) -> None:
    settings = [f"{name}={value}" for name, value in network.environment.items()]
    command = [*network.prefix(0), "env", *settings, sys.executable, "-c", WATCH, network.ray_address]
    with subprocess.Popen([*command, network.addresses[host]], stdout=subprocess.PIPE, encoding="utf-8") as watch:
        assert watch.stdout is not None and watch.stdout.readline() == "watches\n"
        check_long(engine, calm, lambda: network.cut(host))
        network.wait_none(host, "tokenloom worker", 4.0)
        assert network.processes(3 - host, "tokenloom worker 1")
        assert watch.poll() is None, "Ray has noticed it before"
        watch.kill()
    network.end_node(host)


def test_a_link_that_heals_gives_the_place_back_if_there_is_no_other_node(
    engine: RayEngine, network: RayNetwork, host: int, work: list[Work], calm: list[RequestOutput]
) -> None:
    network.end_node(3 - host)
    waits = "requests wait for 1 more host of 2"
    num_waits = engine.log().count(waits)

    def fault() -> None:
        network.cut(host)
        engine.wait_log(waits, num_waits + 1)
        network.heal(host)

    check_long(engine, calm, fault)
    check_equal(calm, answers(engine.address, work))


def test_an_engine_of_one_host_reserves_its_cpus_in_ray(
    network: RayNetwork, host: int, work: list[Work], calm: list[RequestOutput]
) -> None:
    with RayEngine(network, *EXACT) as other:
        other.wait_ready()
        check_equal(calm, answers(other.address, work))
        with RayEngine(network, "--start-timeout-s", "10") as third:
            assert "Ray has not placed hosts with CPU 1," in third.refusal()
        launcher = other.child("launcher")
        check_long(other, calm, launcher.kill)
        other.wait_log("launcher is back")
        other.end()


def test_a_node_that_is_added_after_a_loss_takes_the_place(
    engine: RayEngine, network: RayNetwork, host: int, calm: list[RequestOutput]
) -> None:
    network.end_node(3 - host)
    waits = "requests wait for 1 more host of 2: Ray places it on the next free node"
    num_waits = engine.log().count(waits)

    def fault() -> None:
        network.end_node(host)
        engine.wait_log(waits, num_waits + 1)
        assert not is_ready(engine)
        network.start_node(3 - host)

    check_long(engine, calm, fault)
    assert network.processes(3 - host, "tokenloom worker 1")


def test_ranks_outlive_the_head_of_the_cluster_and_the_next_cluster_places_them_anew(
    engine: RayEngine, network: RayNetwork, host: int, work: list[Work], calm: list[RequestOutput]
) -> None:
    launcher, rank = engine.child("launcher"), network.wait_process(host, "tokenloom worker 1")
    for name in ("raylet", "gcs_server"):
        for process in network.processes(0, name):
            process.kill()
    check_equal(calm, answers(engine.address, work))
    assert rank.is_running() and launcher.is_running(), "Ray has noticed it before"
    check_long(engine, calm, network.restart_ray)
    assert engine.child("launcher").pid != launcher.pid
    engine.wait_log("launcher is back")
