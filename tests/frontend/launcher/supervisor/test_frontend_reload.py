"""SIGUSR2 replaces the frontends one by one, which is no failure."""

from __future__ import annotations

import os
import signal

import pytest

from tokenloom.frontend.launcher.supervisor.launcher import Unit
from tokenloom.ipc.messages.supervisor import FrontendDown, HandOver
from tokenloom.tests.frontend.launcher.supervisor.remote_engine import RemoteEngine

pytestmark = pytest.mark.parametrize("engine", [{"tensor_parallel_size": 1, "api_server_count": 2}], indirect=True)
BOTH = [Unit("frontend", 0), Unit("frontend", 1)]


def test_each_frontend_ends_once_the_one_before_is_back(engine: RemoteEngine) -> None:
    engine.start()
    seen: list[int] = []
    os.kill(os.getpid(), signal.SIGUSR2)

    def is_done() -> bool:
        seen.append(sum(engine.supervisor._children.is_up(unit) for unit in BOTH))
        return all(len(engine.of(unit)) == 2 for unit in BOTH) and seen[-1] == 2

    engine.run_until(is_done)
    assert min(seen) == 1
    first, second = (engine.of(unit)[0] for unit in BOTH)
    assert first.has(HandOver) and second.has(HandOver)
    downs = [each.identity for each in engine.core.received if isinstance(each, FrontendDown)]
    assert downs == [first.spec.identity, second.spec.identity]
    assert engine.supervisor._full_progress().num_restarts == 0 and engine.supervisor.losses.last == ""


def test_a_frontend_that_is_lost_instead_is_replaced_as_ever(engine: RemoteEngine) -> None:
    engine.start()
    first = engine.of(BOTH[0])[0]
    first.was_killed = True
    os.kill(os.getpid(), signal.SIGUSR2)
    engine.run_until(lambda: all(len(engine.of(unit)) == 2 for unit in BOTH))
    assert engine.supervisor._full_progress().num_restarts == 1
