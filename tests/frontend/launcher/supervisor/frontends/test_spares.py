"""A spare takes the place of a lost frontend, and the next spare loads once it serves; a spare's own end is no loss."""

from __future__ import annotations

import pytest

from tokenloom.frontend.launcher.supervisor.launcher import FRONTEND
from tokenloom.ipc.messages.supervisor import Initialize, Loaded, StartPhases, TakeOver
from tokenloom.tests.frontend.launcher.supervisor.remote_engine import RemoteEngine

pytestmark = pytest.mark.parametrize("engine", [{"tensor_parallel_size": 1, "spare_frontend": True}], indirect=True)


def test_a_spare_takes_over_and_the_next_one_loads(engine: RemoteEngine) -> None:
    engine.start()
    (first,) = engine.of(FRONTEND)

    def is_done() -> bool:
        spares = engine.supervisor._children.spares
        if spares and spares[0].is_loaded and not first.has_ended:
            assert not engine.of(FRONTEND)[1].has(StartPhases), "it is no part of the engine yet"
            first.end()
        return len(engine.of(FRONTEND)) == 3

    engine.run_until(is_done)
    _, spare, last = engine.of(FRONTEND)
    assert first.is_closed and spare.has(TakeOver) and spare.has(StartPhases)
    assert (spare.spec.number, last.spec.number) == (1, 2)
    assert engine.supervisor.publisher.progress().num_restarts == 1


def test_a_spare_that_is_needed_before_it_has_loaded_takes_over_then(engine: RemoteEngine) -> None:
    engine.spare_says = None
    engine.start()
    (first,) = engine.of(FRONTEND)

    def is_done() -> bool:
        _, *others = engine.of(FRONTEND)
        if others and not first.has_ended:
            first.end()
        elif first.is_closed and not others[0].has(TakeOver):
            assert not engine.supervisor._children.is_up(FRONTEND)
            others[0].send(Loaded())
        return len(others) == 2

    engine.run_until(is_done)
    spare = engine.of(FRONTEND)[1]
    first_kept = [type(each) for each in spare.received].index(Initialize)
    assert [type(each) for each in spare.received].index(TakeOver) < first_kept


def test_the_end_of_a_spare_is_no_loss_and_the_next_one_waits(engine: RemoteEngine) -> None:
    engine.start()
    (first,) = engine.of(FRONTEND)

    def is_done() -> bool:
        _, *others = engine.of(FRONTEND)
        if others and not others[0].has_ended:
            others[0].end()
        elif others and others[0].is_closed and not first.has_ended:
            assert engine.supervisor.publisher.progress().num_restarts == 0
            first.end()
        return len(others) == 2 and engine.supervisor._children.is_up(FRONTEND)

    engine.run_until(is_done)
    last = engine.of(FRONTEND)[2]
    assert last.spec.number == 1 and not last.has(TakeOver)
    assert engine.supervisor.publisher.progress().num_restarts == 1 and engine.supervisor._children.spares == []
