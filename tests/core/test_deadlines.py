"""Deadlines beside a list that is searched whole, while requests come, start, end and time passes."""

from __future__ import annotations

import random
from weakref import WeakSet

import msgspec

from tokenloom.core.deadlines import MAX_EXPIRED, MIN_SWEEP, Deadlines
from tokenloom.core.request import Request, State
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.tests.core.harness import make_request


def is_late(request: Request, now: float) -> bool:
    params, age = request.params, now - request.arrival_time
    in_queue = request.state is State.WAITING and request.num_cached_tokens < 0
    total_s, queue_s = params.timeout_s, params.queue_timeout_s
    return (total_s is not None and age >= total_s) or (queue_s is not None and in_queue and age >= queue_s)


def test_requests_past_their_deadline_expire_and_finished_ones_are_dropped() -> None:
    rng, deadlines, now, num_found = random.Random(3), Deadlines(), 0.0, 0
    alive: list[Request] = []
    known = WeakSet[Request]()
    for key in range(3000):
        now += rng.random()
        request = make_request(key)
        timeout_s, queue_timeout_s = rng.choice([None, 5.0, 1e6]), rng.choice([None, 3.0, 1e6])
        request.params = msgspec.structs.replace(SamplingParams(), timeout_s=timeout_s, queue_timeout_s=queue_timeout_s)
        request.arrival_time = now
        deadlines.add(request)
        alive.append(request)
        known.add(request)
        for each in rng.sample(alive, min(len(alive), 4)):
            if each.state is State.WAITING and rng.random() < 0.5:
                each.move(State.RUNNING)
                each.num_cached_tokens = 0
        ended = rng.sample(alive, max(len(alive) - 20, 0))
        late = deadlines.expired(now)
        assert {each.key for each in late} == {each.key for each in alive if is_late(each, now)}
        num_found += len(late)
        for each in {*late, *ended}:
            each.move(State.FINISHED)
            alive.remove(each)
        del request, each, late, ended
        assert len(known) <= 2 * len(alive) * 2 + MIN_SWEEP
    assert num_found > 100


def test_many_requests_that_expire_together_are_returned_in_bounded_parts() -> None:
    deadlines, requests = Deadlines(), [make_request(key) for key in range(2 * MAX_EXPIRED + 1)]
    for request in requests:
        request.params = msgspec.structs.replace(SamplingParams(), timeout_s=1.0)
        request.arrival_time = 0.0
        deadlines.add(request)
    turns = []
    while deadlines.next is not None and deadlines.next <= 5.0:
        turns.append(deadlines.expired(5.0))
        for request in turns[-1]:
            request.move(State.FINISHED)
    assert [len(turn) for turn in turns] == [MAX_EXPIRED, MAX_EXPIRED, 1]
