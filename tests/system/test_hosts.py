"""An engine over several hosts, which are network namespaces, answers as one process does, whatever is lost."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.tests.support.chaos_work import Work, check_equal
from tokenloom.tests.support.network_hosts import DEADLINE_S, Agent, Network, SpreadEngine, obstacle
from tokenloom.tests.support.waiting import Deadline, wait_until
from tokenloom.tests.system.spread_work import EXACT, PROMPT, answers, calm, check_long, is_ready, work

__all__ = ["calm", "work"]  # fixtures

pytestmark = [
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("network"), 3) as network:
        yield network


@pytest.fixture(scope="module")
def engine(network: Network) -> Iterator[SpreadEngine]:
    """TP 2 over two hosts; one of the other hosts has joined. Each test leaves it so."""
    with SpreadEngine(network, *EXACT, "--tp", "2", "--hosts", "2") as engine:
        network.join(1)
        engine.wait_ready()
        yield engine
        engine.end()
    for agent in network.agents:
        agent.wait_none(agent.alive)
        if agent.is_running():
            agent.wait_none(agent.files)


@pytest.fixture
def agent(engine: SpreadEngine, network: Network) -> Agent:
    """The agent that has a rank; the links are there, and an agent runs, whatever the test before has left."""
    for number in (1, 2):
        network.heal(number)
    if not any(agent.is_running() for agent in network.agents):
        network.join(1)
    return network.wait_agent()


def test_two_hosts_answer_as_one_process(engine: SpreadEngine, work: list[Work], calm: list[RequestOutput]) -> None:
    assert engine.find("worker 1") is None, "the second rank runs on the head"
    check_equal(calm, answers(engine.address, work))


@pytest.mark.nightly
def test_a_lost_rank_changes_no_answer(engine: SpreadEngine, agent: Agent, calm: list[RequestOutput]) -> None:
    rank = agent.wait_rank()
    check_long(engine, calm, rank.kill)
    assert agent.wait_rank().pid != rank.pid


@pytest.mark.nightly
def test_a_spare_host_takes_the_place_of_one_whose_agent_was_killed(
    engine: SpreadEngine, network: Network, agent: Agent, calm: list[RequestOutput]
) -> None:
    spare = network.join(2)
    engine.wait_log(f"host {spare.address} has joined")

    def fault() -> None:
        agent.end()
        agent.wait_none(agent.alive, 4.0)

    check_long(engine, calm, fault)
    assert spare.rank() is not None
    said = re.search(rf"host {re.escape(agent.address)} is lost: no sign of life for (\d+\.\d) s", engine.log())
    assert said and float(said[1]) >= LEASE_S


def test_a_host_that_is_told_to_stop_is_lost_at_once_and_requests_wait_for_the_next(
    engine: SpreadEngine, network: Network, agent: Agent, calm: list[RequestOutput]
) -> None:
    num_waits = engine.log().count("requests wait for 1 more host of 2")

    def fault() -> None:
        agent.signal(signal.SIGTERM)
        assert agent.wait_exit() == 0
        assert not agent.alive() and not agent.files()
        engine.wait_log("requests wait for 1 more host of 2", num_waits + 1)
        assert not is_ready(engine)
        network.join(1)

    check_long(engine, calm, fault)
    assert is_ready(engine)


@pytest.mark.nightly
@pytest.mark.parametrize("outlasts_lease", [False, True])
def test_a_link_that_is_cut_for_a_while_changes_no_answer(
    engine: SpreadEngine, network: Network, agent: Agent, calm: list[RequestOutput], outlasts_lease: bool
) -> None:
    joined, is_lost = f"host {agent.address} has joined", f"host {agent.address} is lost"
    num_joined, num_lost = engine.log().count(joined), engine.log().count(is_lost)
    rank = agent.wait_rank()

    def fault() -> None:
        network.cut(agent.number)
        if outlasts_lease:
            wait_until(lambda: not rank.is_running(), "a cut-off rank lives", 4.5)
            engine.wait_log(is_lost, num_lost + 1)
        else:
            with pytest.raises(psutil.TimeoutExpired):
                rank.wait(2 * LEASE_S / 3)
        network.heal(agent.number)

    check_long(engine, calm, fault)
    assert engine.log().count(joined) == num_joined + outlasts_lease


@pytest.mark.nightly
def test_requests_wait_for_a_host_that_is_cut_off_for_ever(
    engine: SpreadEngine, network: Network, agent: Agent, calm: list[RequestOutput]
) -> None:
    num_waits = engine.log().count("requests wait for 1 more host of 2")

    def fault() -> None:
        network.cut(agent.number)
        engine.wait_log("requests wait for 1 more host of 2", num_waits + 1)
        agent.wait_none(agent.alive)
        with Client(engine.address) as client:
            (late,) = client.generate(PROMPT, SamplingParams(max_tokens=3, timeout_s=1.0), use_tqdm=False)
        assert late.outputs[0].finish_reason == "timeout"
        network.join(3 - agent.number)

    check_long(engine, calm, fault)
    network.heal(agent.number)
    agent.end()


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["rank", "agent", "head"])
def test_a_stopped_process_changes_no_answer(
    engine: SpreadEngine, network: Network, agent: Agent, calm: list[RequestOutput], victim: str
) -> None:
    process = {"rank": agent.wait_rank().pid, "agent": agent.process.pid, "head": engine.process.pid}[victim]
    joined = f"host {agent.address} has joined"
    num_joined, num_lost = engine.log().count(joined), engine.log().count(f"host {agent.address} is lost")

    def fault() -> None:
        os.kill(process, signal.SIGSTOP)
        if victim == "rank":  # the core finds it hanging, and it is killed
            return
        if victim == "agent":
            engine.wait_log(f"host {agent.address} is lost", num_lost + 1)
        else:
            wait_until(Deadline(6).has_passed)
        os.kill(process, signal.SIGCONT)
        engine.wait_log(joined, num_joined + 1)

    check_long(engine, calm, fault)


@pytest.fixture
def other_network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, 2) as network:
        yield network


@pytest.mark.nightly
def test_when_the_head_is_killed_its_hosts_and_clients_go_on_with_the_next(
    other_network: Network, work: list[Work], calm: list[RequestOutput]
) -> None:
    agent = other_network.join(1)
    listen = ["--listen", f"ipc://{other_network.folder}/engine.sock"]
    with SpreadEngine(other_network, *EXACT, "--tp", "2", "--hosts", "2", *listen) as engine:
        engine.wait_ready()
        agent.wait_rank()

        def fault() -> None:
            engine.signal(signal.SIGKILL)
            agent.wait_none(agent.alive)
            engine.start_again()

        check_long(engine, calm, fault)
        check_equal(calm, answers(engine.address, work))
        assert engine.stop() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("num_spare", [0, 1])
def test_a_rolling_restart_of_all_hosts_loses_and_changes_no_answer(
    tmp_path: Path, work: list[Work], calm: list[RequestOutput], num_spare: int
) -> None:
    options = [*EXACT, "--tp", "4", "--hosts", "3"]
    with Network(tmp_path, 3 + num_spare) as network, SpreadEngine(network, *options) as engine:
        agents = [network.join(number) for number in range(1, 3 + num_spare)]
        engine.wait_ready()
        is_over = threading.Event()

        def ask_again_and_again() -> list[list[RequestOutput]]:
            rounds = []
            while not is_over.is_set():
                rounds.append(answers(engine.address, work))
            return rounds

        with ThreadPoolExecutor(2) as pool:
            streams = [pool.submit(ask_again_and_again) for _ in range(2)]
            for agent in agents:
                agent.processes()
                joined = f"host {agent.address} has joined"
                num_joined = engine.log().count(joined)
                agent.signal(signal.SIGTERM)
                assert agent.wait_exit() == 0
                agent.wait_none(agent.alive)
                network.join(agent.number)
                engine.wait_log(joined, num_joined + 1)
                wait_until(lambda: is_ready(engine), timeout_s=DEADLINE_S)
            is_over.set()
            rounds = [each for stream in streams for each in stream.result(2 * DEADLINE_S)]
        assert engine.stop() == 0
    assert rounds
    for found in rounds:
        check_equal(calm, found)


def test_a_host_with_another_key_is_refused(engine: SpreadEngine, network: Network, tmp_path: Path) -> None:
    Keys.generate().save(tmp_path / "other.key")
    agent = network.join(2, key_file=tmp_path / "other.key")
    assert agent.wait_exit() == 2
    assert "other keys than --key-file" in agent.log()
    assert f"host {agent.address} has joined" not in engine.log()
