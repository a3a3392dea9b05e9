"""Replicas are restarted one after the other, each once all frontends have nothing there, and never the last one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tokenloom.frontend.supervisor.launcher import CORE, FRONTEND, WORKERS, Unit
from tokenloom.frontend.supervisor.supervisor import Supervisor
from tokenloom.ipc.messages.supervisor import (
    CoreUp,
    DrainReplica,
    ReplicaDown,
    ReplicaDrained,
    ReplicasRestarted,
    RestartReplicas,
)
from tokenloom.tests.frontend.supervisor.test_supervisor import RemoteLauncher, RemoteProcess, stop_when
from tokenloom.tests.frontend.supervisor.test_supervisor import launcher as launcher
from tokenloom.tests.frontend.supervisor.test_supervisor import listeners as listeners
from tokenloom.tests.frontend.supervisor.test_supervisor import supervisor as supervisor

TWO = pytest.mark.parametrize("launcher", [{"tensor_parallel_size": 1, "data_parallel_size": 2}], indirect=True)
CORES = [CORE, Unit("core", 1)]
NOTICES = (DrainReplica, ReplicaDown, CoreUp, ReplicasRestarted)


def drain_when_asked(launcher: RemoteLauncher, then: Callable[[], bool]) -> Callable[[], bool]:
    """Let each frontend reply to DrainReplica at the next turn, then call `then`."""
    num_replied: dict[RemoteProcess, int] = {}

    def turn() -> bool:
        for frontend in launcher.of(FRONTEND):
            drains = [message for message in frontend.received if isinstance(message, DrainReplica)]
            for order in drains[num_replied.get(frontend, 0) :]:
                frontend.send(ReplicaDrained(replica=order.replica))
            num_replied[frontend] = len(drains)
        return then()

    return turn


@TWO
def test_all_replicas_are_restarted_in_turn_and_each_drains_first(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    supervisor.start()
    (frontend,) = launcher.of(FRONTEND)
    before = len(frontend.received)
    frontend.send(RestartReplicas())
    frontend.send(RestartReplicas())  # of a client that has lost its frontend: the same order
    is_done = lambda: any(isinstance(each, ReplicasRestarted) for each in frontend.received)  # noqa: E731
    stop_when(launcher, drain_when_asked(launcher, is_done))
    supervisor.run()
    found = [each for each in frontend.received[before:] if isinstance(each, NOTICES)]
    kinds = [(type(each), getattr(each, "replica", None)) for each in found]
    of_each = [(DrainReplica, 0), (ReplicaDown, 0), (CoreUp, 0), (DrainReplica, 1), (ReplicaDown, 1), (CoreUp, 1)]
    assert kinds == [*of_each, (ReplicasRestarted, None)]
    assert found[-1] == ReplicasRestarted()
    for unit in (*CORES, WORKERS, Unit("worker", 1)):
        assert [process.is_closed for process in launcher.of(unit)] == [True, False]
    assert supervisor._full_progress().num_restarts == 0, "an order is no failure"


@TWO
def test_a_frontend_that_is_lost_meanwhile_has_drained_and_its_successor_is_asked(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    supervisor.start()
    (first,) = launcher.of(FRONTEND)
    first.send(RestartReplicas(replica=1))

    def end_first() -> bool:
        if any(isinstance(each, DrainReplica) for each in first.received) and not first.has_ended:
            first.end()
        successors = launcher.of(FRONTEND)[1:]
        return any(isinstance(each, ReplicasRestarted) for frontend in successors for each in frontend.received)

    stop_when(launcher, end_first)  # a lost frontend has no answers anywhere: that is enough
    supervisor.run()
    assert [len(launcher.of(unit)) for unit in CORES] == [1, 2]


@TWO
def test_a_replica_drains_once_the_other_one_is_back(launcher: RemoteLauncher, supervisor: Supervisor) -> None:
    supervisor.start()
    (frontend,) = launcher.of(FRONTEND)
    launcher.obstacles[CORES[1]] = "not yet"
    launcher.of(CORES[1])[0].end()
    num_turns = 0

    def ask() -> bool:
        nonlocal num_turns
        if any(isinstance(each, ReplicaDown) for each in frontend.received):
            num_turns += 1
        if num_turns == 1:
            frontend.send(RestartReplicas(replica=0))
        elif num_turns == 4:
            assert not any(isinstance(each, DrainReplica) for each in frontend.received)
            launcher.obstacles.clear()
        return any(isinstance(each, ReplicasRestarted) for each in frontend.received)

    stop_when(launcher, drain_when_asked(launcher, ask))
    supervisor.run()
    (reply,) = [each for each in frontend.received if isinstance(each, ReplicasRestarted)]
    assert reply.error is None
    assert [len(launcher.of(unit)) for unit in CORES] == [2, 2]


@TWO
@pytest.mark.parametrize("order", [RestartReplicas(replica=7), RestartReplicas(replica=0)])
def test_an_order_that_cannot_be_carried_out_is_refused_with_the_reason(
    launcher: RemoteLauncher, supervisor: Supervisor, order: RestartReplicas
) -> None:
    supervisor.start()
    (frontend,) = launcher.of(FRONTEND)
    if order.replica == 0:  # the other replica has no workers meanwhile
        launcher.obstacles[Unit("worker", 1)] = "a host is missing"
        launcher.of(Unit("worker", 1))[0].end()
        is_down = lambda: any(isinstance(each, ReplicaDown) for each in frontend.received)  # noqa: E731
    else:
        is_down = lambda: True  # noqa: E731

    def ask() -> bool:
        if is_down():
            frontend.send(order)
            launcher.script = lambda: None
            stop_when(launcher, lambda: any(isinstance(each, ReplicasRestarted) for each in frontend.received))
        return False

    stop_when(launcher, ask)
    supervisor.run()
    (reply,) = [each for each in frontend.received if isinstance(each, ReplicasRestarted)]
    assert reply.error is not None
    expected = "there is no replica 7: replicas 0, 1 run" if order.replica else "no other replica serves"
    assert expected in reply.error.message
    assert not any(isinstance(each, DrainReplica) for each in frontend.received)
