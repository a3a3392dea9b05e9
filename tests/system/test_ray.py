"""An engine on a Ray cluster answers as one process does. The nodes are network namespaces with raylets."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tokenloom import RequestOutput
from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.tests.support.chaos_work import Work, check_equal
from tokenloom.tests.support.ray_network import RAY_PORT, RayEngine, RayNetwork, obstacle
from tokenloom.tests.support.today import some
from tokenloom.tests.support.waiting import Deadline, wait_until
from tokenloom.tests.system.spread_work import EXACT, answers, calm_answers, check_long, work

__all__ = ["work"]  # a fixture

PLACES = """
import sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tokenloom.frontend.launcher.ray.agent import own_place
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
for node in ray.nodes():
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    task = ray.remote(own_place).options(num_cpus=0, num_gpus=2, scheduling_strategy=strategy)
    place = ray.get(task.remote(), timeout=60)
    print(f"{place.address}={place.visible_devices}")
"""

pytestmark = [
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be a cluster"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def network() -> Iterator[RayNetwork]:
    with RayNetwork(2) as network:
        yield network


@pytest.fixture(scope="module")
def engine(network: RayNetwork) -> Iterator[RayEngine]:
    with RayEngine(network, *EXACT, "--tp", "2", "--hosts", "2") as engine:
        engine.wait_ready()
        yield engine
        engine.processes()
        num_errors = engine.log().count("ERROR")
        assert engine.stop() == 0 and not engine.leftovers()
        network.wait_none(1, "tokenloom", 5.0)
        assert engine.log().count("ERROR") == num_errors, "a stop is no loss of hosts"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, work: list[Work], engine: RayEngine) -> list[RequestOutput]:
    return calm_answers(tmp_path_factory.mktemp("calm"), work)


def test_a_rank_that_ray_placed_answers_as_one_process(
    engine: RayEngine, network: RayNetwork, work: list[Work], calm: list[RequestOutput]
) -> None:
    assert engine.find("worker 1") is None, "the second rank runs on the head"
    (rank,) = network.processes(1, "tokenloom worker 1")
    assert rank.nice() == 0, "other work comes first"
    check_equal(calm, answers(engine.address, work))


def test_ray_is_imported_by_the_launcher_alone(engine: RayEngine) -> None:
    with_ray = set()
    for process in engine.processes():
        if any("/ray/_raylet" in each.path for each in process.memory_maps()):
            with_ray.add(" ".join(process.cmdline()).strip())
    assert with_ray == {"tokenloom launcher"}


def test_a_killed_agent_is_reported_by_ray_and_placed_again(
    engine: RayEngine, network: RayNetwork, calm: list[RequestOutput]
) -> None:
    def losses() -> list[str]:
        return re.findall(r"host 10\.44\.0\.2 is lost: (.*)", engine.log())

    def kill() -> None:
        nonlocal was_busy
        ray = [process.pid for number in (0, 1) for process in network.processes(number)]  # no children of this process
        lease = Deadline(LEASE_S, ray)
        agent.kill()
        wait_until(losses)
        was_busy = not lease.has_passed()

    was_busy = False
    agent = network.wait_process(1, "tokenloom host")
    check_long(engine, calm, kill)
    assert network.wait_process(1, "tokenloom host").pid != agent.pid
    (loss,) = losses()
    is_noticed = loss in ("its agent was killed by SIGKILL", "another agent has started there")
    assert is_noticed or was_busy, f"Ray has not reported the end of an agent within {LEASE_S} s: {engine.log()}"


def test_gpus_are_those_that_ray_assigns_whether_it_sets_the_variable_or_not(
    engine: RayEngine, network: RayNetwork
) -> None:
    found = network.run_program(PLACES).split()
    assert sorted(found) == ["10.44.0.1=0,1", "10.44.0.2=0,1"]


@pytest.mark.parametrize(
    ("num_ranks", "port", "words"),
    some(
        [
            (8, RAY_PORT, "CPU 4 and 4, each on a node of its own, within 1 s; free beside the reserved"),
            (2, 1, "no Ray cluster at {address}"),
        ],
        1,
    ),
)
def test_a_start_without_room_or_cluster_ends_with_what_is_asked_and_free_or_the_address(
    engine: RayEngine, network: RayNetwork, num_ranks: int, port: int, words: str
) -> None:
    address = f"{network.addresses[0]}:{port}"
    arguments = ["--tp", str(num_ranks), "--hosts", "2", "--start-timeout-s", "10"]
    with RayEngine(network, *arguments, changes=[("RAY_ADDRESS", address)]) as other:
        assert words.format(address=address) in other.refusal()
