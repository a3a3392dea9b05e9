"""Resumed requests come to a core at most twice as fast as it computes them, and never stand still."""

from __future__ import annotations

import random

import pytest

from tokenloom.frontend.replicas.resume_pacer import FACTOR, WINDOW_S, ResumePacer
from tokenloom.frontend.replicas.router import FIRST_RATE, Router
from tokenloom.tests.support.today import seeds

MOST = FACTOR * FIRST_RATE * WINDOW_S  # tokens, before any rate is measured


def new_pacer(num_cores: int) -> tuple[Router, ResumePacer]:
    router = Router()
    for core in range(num_cores):
        router.add(core)
    return router, ResumePacer(router)


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_a_core_gets_at_most_its_limit_and_one_request_in_any_second_and_waits_no_longer(seed: int) -> None:
    draw, now, sent = random.Random(seed), 0.0, list[tuple[float, int, int]]()
    router, pacer = new_pacer(num_cores := draw.choice([1, 3]))

    def recent(core: int, at: float) -> int:
        return sum(tokens for when, to, tokens in sent if to == core and when + WINDOW_S > at)

    for _ in range(200):
        num_tokens, begun_at = draw.randint(1, 15_000), now
        while (core := pacer.pick([], num_tokens, num_tokens, now)) is None:
            now = pacer.end()
            assert begun_at < now <= begun_at + WINDOW_S, "each core gets one a second"
        assert pacer.end() == float("inf") or recent(core, now) < MOST
        assert recent(core, now) < MOST
        if now > begun_at:  # a moment before it would have been too much, anywhere
            assert all(recent(each, now - 1e-6) >= MOST for each in range(num_cores))
        assert sorted(router.cores) == list(range(num_cores))
        sent.append((now, core, num_tokens))
        now += draw.choice([0.0, 0.0, draw.uniform(0, 2)])


def test_a_core_that_has_got_enough_is_passed_over_and_a_successor_starts_anew() -> None:
    _, pacer = new_pacer(2)
    assert {pacer.pick([], 1, int(MOST), 5.0) for _ in range(2)} == {0, 1}
    assert pacer.pick([], 1, 1, 5.0) is None and pacer.end() == 5.0 + WINDOW_S
    pacer.forget(1)
    assert pacer.pick([], 1, 1, 5.0) == 1
