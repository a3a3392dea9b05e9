"""Replicas are restarted one after the other, each once all frontends have nothing there, and never the last one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tokenloom.frontend.launcher.supervisor.launcher import CORE, WORKERS, Unit
from tokenloom.ipc.messages.orders import Order, Ordered
from tokenloom.ipc.messages.supervisor import (
    CoreUp,
    DrainReplica,
    ReplicaDown,
    ReplicaDrained,
)
from tokenloom.tests.frontend.launcher.supervisor.remote_engine import RemoteEngine

pytestmark = pytest.mark.parametrize("engine", [{"tensor_parallel_size": 1, "data_parallel_size": 2}], indirect=True)
CORES = [CORE, Unit("core", 1)]
NOTICES = (DrainReplica, ReplicaDown, CoreUp, Ordered)


def restart(replica: int | None = None) -> Order:
    return Order(order_id="1", action="restart_replicas", replica=replica)


def drain_when_asked(engine: RemoteEngine, then: Callable[[], object]) -> Ordered:
    """Let the frontend reply to each DrainReplica at the next turn and call `then`, until it has the order's reply;
    return that."""
    (frontend,) = engine.frontends
    num_replied = 0

    def turn() -> bool:
        nonlocal num_replied
        drains = [message for message in frontend.received if isinstance(message, DrainReplica)]
        for order in drains[num_replied:]:
            frontend.send(ReplicaDrained(replica=order.replica))
        num_replied = len(drains)
        then()
        return frontend.has(Ordered)

    engine.run_until(turn)
    (reply,) = (each for each in frontend.received if isinstance(each, Ordered))
    return reply


def test_all_replicas_are_restarted_in_turn_and_each_drains_first(engine: RemoteEngine) -> None:
    engine.start()
    (frontend,) = engine.frontends
    before = len(frontend.received)
    frontend.send(restart())
    frontend.send(restart())  # of a client that has lost its frontend: the same order
    assert drain_when_asked(engine, lambda: None) == Ordered(order_id="1")
    found = [each for each in frontend.received[before:] if isinstance(each, NOTICES)]
    of_each = [(kind, number) for number in (0, 1) for kind in (DrainReplica, ReplicaDown, CoreUp)]
    assert [(type(each), getattr(each, "replica", None)) for each in found] == [*of_each, (Ordered, None)]
    for unit in (*CORES, WORKERS, Unit("worker", 1)):
        assert [process.is_closed for process in engine.of(unit)] == [True, False]
    assert engine.supervisor.publisher.progress().num_restarts == 0, "an order is no failure"


def test_a_frontend_that_is_lost_meanwhile_has_drained_and_its_successor_is_asked(engine: RemoteEngine) -> None:
    engine.start()
    (first,) = engine.frontends
    first.send(restart(1))

    def end_first() -> bool:  # a lost frontend has no answers anywhere: that is enough
        if first.has(DrainReplica):
            first.end()
        return any(frontend.has(Ordered) for frontend in engine.frontends[1:])

    engine.run_until(end_first)
    assert [len(engine.of(unit)) for unit in CORES] == [1, 2]


def test_a_replica_drains_once_the_other_one_is_back(engine: RemoteEngine) -> None:
    engine.start()
    (frontend,) = engine.frontends
    engine.obstacles[CORES[1]] = "not yet"
    engine.of(CORES[1])[0].end()
    num_turns = 0

    def ask() -> None:
        nonlocal num_turns
        num_turns += frontend.has(ReplicaDown)
        if num_turns == 1:
            frontend.send(restart(0))
        elif num_turns == 4:
            assert not frontend.has(DrainReplica)
            engine.obstacles.clear()

    assert drain_when_asked(engine, ask).error is None
    assert [len(engine.of(unit)) for unit in CORES] == [2, 2]


@pytest.mark.parametrize(
    ("replica", "reason"), [(7, "there is no replica 7: replicas 0, 1 run"), (0, "no other replica serves")]
)
def test_an_order_that_cannot_be_carried_out_is_refused_with_the_reason(
    engine: RemoteEngine, replica: int, reason: str
) -> None:
    engine.start()
    (frontend,) = engine.frontends
    engine.obstacles[Unit("worker", 1)] = "a host is missing"
    engine.of(Unit("worker", 1))[0].end()
    is_asked = False

    def ask() -> None:
        nonlocal is_asked
        if frontend.has(ReplicaDown) and not is_asked:
            is_asked = True
            frontend.send(restart(replica))

    error = drain_when_asked(engine, ask).error
    assert error is not None and reason in error.message and not frontend.has(DrainReplica)
