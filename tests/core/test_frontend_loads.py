"""Each frontend is told of the work of the others when it changes, and at last that nothing is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from tokenloom.core.links.frontend_loads import INTERVAL_S, FrontendLoads
from tokenloom.core.request import Request
from tokenloom.ipc.messages.core import Load


def of(frontend_id: int, num_tokens: int, row: int = -1) -> Request:
    return cast(Request, SimpleNamespace(frontend_id=frontend_id, num_tokens=num_tokens, row=row))


def test_each_frontend_is_told_the_work_of_the_others() -> None:
    loads = FrontendLoads()
    requests = [of(0, 10), of(0, 20, row=3), of(1, 5)]
    assert loads.changed(requests, [0, 1], 7.0) == {
        0: Load(waiting_tokens=5, num_open=1),
        1: Load(waiting_tokens=10, num_open=2),
    }
    assert loads.next_at == 7.0 + INTERVAL_S
    assert loads.changed([], [0, 1], 7.0 + INTERVAL_S / 2) == {}, "too soon"
    assert loads.changed([of(0, 10), of(0, 20)], [0, 1], 7.2) == {0: Load(), 1: Load(waiting_tokens=30, num_open=2)}
    assert loads.changed([], [0, 1], 7.4) == {1: Load()}
    assert loads.next_at is None and loads.changed([], [0, 1], 7.6) == {}


def test_a_frontend_whose_only_other_is_lost_is_told_that_the_work_of_others_is_gone() -> None:
    loads, requests = FrontendLoads(), [of(0, 10), of(1, 5)]
    assert len(loads.changed(requests, [0, 1], 7.0)) == 2
    assert loads.changed([of(0, 10)], [0], 7.2) == {0: Load()}
    assert loads.next_at is None, "a time that is over would keep the core busy"


def test_nothing_is_due_for_an_only_frontend_or_when_all_are_lost() -> None:
    loads = FrontendLoads()
    assert len(loads.changed([of(0, 10), of(1, 5)], [0, 1], 7.0)) == 2
    assert loads.changed([], [], 7.2) == {} and loads.next_at is None
    only = FrontendLoads()
    assert only.changed([of(0, 10)], [0], 7.0) == {} and only.next_at is None
