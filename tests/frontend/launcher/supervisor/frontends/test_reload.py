"""Frontends are replaced one by one, each once the next one has loaded, which is no failure."""

from __future__ import annotations

import os
import signal

import pytest

from tokenloom.frontend.launcher.supervisor.launcher import Unit
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.orders import Order, Ordered
from tokenloom.ipc.messages.supervisor import Failed, FrontendDown, HandOver, TakeOver
from tokenloom.tests.frontend.launcher.supervisor.remote_engine import RemoteEngine, RemoteProcess

pytestmark = pytest.mark.parametrize("engine", [{"tensor_parallel_size": 1, "api_server_count": 2}], indirect=True)
BOTH = [Unit("frontend", 0), Unit("frontend", 1)]
RELOAD = Order(order_id="1", action="reload_frontends")


def replies(process: RemoteProcess) -> list[Ordered]:
    return [each for each in process.received if isinstance(each, Ordered)]


def test_each_frontend_ends_once_the_one_before_is_back(engine: RemoteEngine) -> None:
    engine.start()
    seen: list[int] = []
    os.kill(os.getpid(), signal.SIGUSR2)

    def is_done() -> bool:
        seen.append(sum(engine.supervisor._children.is_up(unit) for unit in BOTH))
        return all(len(engine.of(unit)) == 2 for unit in BOTH) and seen[-1] == 2 and engine.of(BOTH[1])[0].is_closed

    engine.run_until(is_done)
    assert min(seen) == 1
    first, second = (engine.of(unit)[0] for unit in BOTH)
    assert first.has(HandOver) and second.has(HandOver)
    downs = [each.identity for each in engine.core.received if isinstance(each, FrontendDown)]
    assert downs == [first.spec.identity, second.spec.identity]
    assert engine.supervisor.publisher.progress().num_restarts == 0 and engine.supervisor.losses.last == ""


def test_an_order_is_replied_when_all_are_new_also_to_those_that_came_meanwhile(engine: RemoteEngine) -> None:
    engine.start()
    os.kill(os.getpid(), signal.SIGUSR2)
    engine.of(BOTH[1])[0].send(RELOAD)
    engine.run_until(lambda: any(replies(each) for each in engine.frontends))
    assert [len(engine.of(unit)) for unit in BOTH] == [2, 2]
    assert replies(engine.of(BOTH[1])[1]) == [Ordered(order_id="1")]


def test_a_frontend_stays_if_the_next_one_does_not_load(engine: RemoteEngine) -> None:
    engine.start()
    first = engine.of(BOTH[0])[0]
    first.send(RELOAD)

    def is_done() -> bool:
        if len(engine.of(BOTH[0])) == 2:
            engine.spare_says = Failed(error=ErrorInfo("config", "the tokenizer is gone"))
        return bool(replies(engine.of(BOTH[0])[-1]))

    engine.run_until(is_done)
    (reply,) = replies(engine.of(BOTH[0])[1])
    assert reply.error is not None
    text = "the next frontend 1 has not come up, the one before goes on; 1 of 2 were replaced: "
    assert reply.error.message == f"{text}frontend 1 failed: the tokenizer is gone"
    assert not engine.of(BOTH[1])[0].has(HandOver) and engine.supervisor._children.spares == []
    assert engine.supervisor._children.is_up(BOTH[1])
    assert engine.supervisor.publisher.progress().num_restarts == 0


def test_a_frontend_that_is_lost_instead_is_replaced_by_the_one_that_loads(engine: RemoteEngine) -> None:
    engine.start()
    first = engine.of(BOTH[0])[0]
    first.was_killed = True
    os.kill(os.getpid(), signal.SIGUSR2)
    engine.run_until(lambda: all(len(engine.of(unit)) == 2 and engine.of(unit)[0].is_closed for unit in BOTH))
    assert engine.of(BOTH[0])[1].has(TakeOver)
    assert engine.supervisor.publisher.progress().num_restarts == 1
