"""Under the priority policy a new request takes the place of running requests behind it."""

from __future__ import annotations

import random

import pytest

from tokenloom.core.admission import AGING_S
from tokenloom.core.request import Request
from tokenloom.core.scheduling.preemption import MAX_VICTIMS_PER_STEP
from tokenloom.tests.core.harness import Harness, prompt_of
from tokenloom.tests.support.today import some


def running_keys(harness: Harness) -> set[int]:
    return {request.key for request in harness.core.scheduler.rows.requests()}


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_a_new_request_takes_the_row_of_the_cheapest_one_behind_it(policy: str) -> None:
    harness = Harness(max_num_seqs=3, scheduling_policy=policy)
    harness.add(0, [1] * 9, 30, priority=2)
    harness.add(1, [2] * 3, 30, priority=2)  # the cheapest
    harness.add(2, [3] * 2, 30, priority=1)  # has fewer tokens and a higher priority
    harness.turn()
    harness.add(3, [4] * 5, 30, priority=0)
    harness.turn()
    assert running_keys(harness) == ({0, 2, 3} if policy == "priority" else {0, 1, 2})
    harness.run_to_the_end()


def test_a_new_request_takes_blocks_of_as_many_as_it_needs() -> None:
    harness = Harness(33, max_num_seqs=8, steps_in_flight=1, scheduling_policy="priority")
    for key in range(4):
        harness.add(key, [key] * 30, 8, priority=3)
    harness.turn()
    assert running_keys(harness) == {0, 1, 2}
    harness.add(4, [9] * 60, 8)
    harness.turn()
    assert 4 in running_keys(harness) and harness.core.scheduler.num_preemptions == 2
    harness.run_to_the_end()


def test_nothing_is_preempted_for_a_request_that_would_not_fit_then() -> None:
    harness = Harness(num_blocks=33, max_num_seqs=8, scheduling_policy="priority")
    harness.add(0, [1] * 60, 8)
    harness.add(1, [2] * 40, 8, priority=3)
    harness.turn()
    harness.add(2, [3] * 90, 8, priority=1)  # needs blocks of request 0, which is ahead
    harness.turn()
    assert running_keys(harness) == {0, 1} and harness.core.scheduler.num_preemptions == 0
    harness.run_to_the_end()


def test_a_preempted_request_preempts_nothing() -> None:
    harness = Harness(max_num_seqs=2, scheduling_policy="priority")
    harness.add(0, [1] * 3, 30, priority=1)
    harness.add(1, [2] * 9, 30, priority=1)  # later, and costlier
    harness.turn()
    harness.add(2, [3], 30)
    for _ in range(5):
        harness.turn()
        assert running_keys(harness) == {1, 2}, "request 0 is ahead of request 1 and waits for a free row"
    harness.run_to_the_end()


@pytest.mark.parametrize("seed", some(range(12), 3))
def test_preemptions_are_bounded_by_step_and_by_request(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.choice([1, 3, 12])
    harness = Harness(400, max_num_seqs=num_rows, max_num_batched_tokens=64, scheduling_policy="priority")
    scheduler, num_requests = harness.core.scheduler, 60
    began: set[Request] = set()
    for key in range(num_requests):
        harness.add(key, prompt_of(rng, rng.randrange(1, 20)), rng.randrange(1, 20), priority=rng.randrange(-5, 6))
        for _ in range(rng.randrange(4)):
            before, num_before = set(scheduler.rows.requests()), scheduler.num_preemptions
            harness.core.step()
            victims = {request for request in before if request.row < 0}
            new = set(scheduler.rows.requests()) - before - began
            assert scheduler.num_preemptions - num_before <= 2 * MAX_VICTIMS_PER_STEP, "two steps in flight"
            if victims:
                assert min(request.sort_key for request in new) < min(request.sort_key for request in victims)
            began |= new
            harness.answer()
            scheduler.check_invariants()
    assert scheduler.num_preemptions <= num_requests, "with blocks for all, each new request takes one row"
    harness.run_to_the_end()


def test_a_request_of_low_priority_is_not_overtaken_for_ever() -> None:
    harness = Harness(max_num_seqs=1, scheduling_policy="priority")
    harness.add(0, [1, 2, 3], 20, priority=1)
    harness.turn()
    key = 0
    while 0 not in harness.finished:
        key += 1
        harness.add(key, [key, 1], 6)
        harness.turns(3)
        assert key < 2 * AGING_S + 40, "it runs after the requests of its first 60 s, which take twice as long"
    assert harness.finished[0].num_preemptions > 0
    harness.check(0)
