"""A request that comes from a lost core brings its losses: it runs alone if it may have been their cause."""

from __future__ import annotations

import random

import pytest

from tokenloom.core.request import Request
from tokenloom.tests.core.harness import Harness, prompt_of

NUM_OTHERS = 5
SUSPECT = 99


def new_harness() -> Harness:
    """Return a harness in which others run, with some tokens each."""
    harness, rng = Harness(num_blocks=200, max_num_seqs=8), random.Random(3)
    for key in range(NUM_OTHERS):
        harness.add(key, prompt_of(rng, 9), 30)
    harness.turns(6)
    assert all(harness.tokens[key] for key in range(NUM_OTHERS))
    return harness


def running(harness: Harness) -> list[int]:
    requests: list[Request] = harness.core.scheduler.rows.requests()
    return sorted(request.key for request in requests)


@pytest.mark.parametrize("num_losses", [0, 1, 2])
def test_a_request_with_two_losses_runs_alone_until_it_has_a_token_and_no_token_is_lost(num_losses: int) -> None:
    harness = new_harness()
    harness.add(SUSPECT, prompt_of(random.Random(4), 30), 10, num_losses=num_losses)
    harness.core.step()
    assert running(harness) == ([SUSPECT] if num_losses == 2 else [*range(NUM_OTHERS), SUSPECT])
    harness.run_to_the_end()


def test_a_request_with_two_losses_that_ends_the_workers_is_given_up_at_once_and_others_complete() -> None:
    harness = new_harness()
    while harness.worker.queue:  # steps in flight are of the others
        harness.answer()
    harness.add(SUSPECT, prompt_of(random.Random(4), 30), 10, num_losses=2)
    generation = harness.generation
    harness.run_with_deadly_workers(lambda: harness.computes(SUSPECT))
    assert harness.generation == generation + 1
    assert "3 times and was given up" in harness.error_of(SUSPECT)
    for key in range(NUM_OTHERS):
        harness.check(key)


def test_several_suspects_with_several_answers_each_run_one_after_the_other() -> None:
    harness = new_harness()
    for first in (100, 102):
        harness.add(first, prompt_of(random.Random(5), 20), 5, n=2, num_losses=2, arrival_time=0.0)
    ran = set[tuple[int, ...]]()
    for _ in range(400):
        harness.core.step()
        ran.add(tuple(key for key in running(harness) if key >= 100 and not harness.tokens[key]))
        harness.answer()
        if not harness.core.num_requests:
            break
    assert not harness.core.num_requests, "somebody waits for ever"
    assert all(len(keys) <= 1 for keys in ran), ran
