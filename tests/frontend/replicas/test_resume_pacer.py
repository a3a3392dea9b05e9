"""Resumed requests come to a core at most twice as fast as it computes them, and never stand still."""

from __future__ import annotations

import random

import pytest

from tokenloom.frontend.replicas.resume_pacer import FACTOR, WINDOW_S, ResumePacer


@pytest.mark.parametrize("seed", range(20))
def test_a_core_gets_at_most_its_limit_and_one_request_in_any_second_and_waits_no_longer(seed: int) -> None:
    draw, pacer, now = random.Random(seed), ResumePacer(), 0.0
    rate, sent = draw.choice([0.5, 100.0, 5000.0]), list[tuple[float, int]]()
    for _ in range(200):
        num_tokens, begun_at = draw.randint(1, 4000), now
        while (next_at := pacer.next_at(0, rate, now)) > now:
            assert next_at <= now + WINDOW_S
            now = next_at
        recent = sum(tokens for at, tokens in sent if at + WINDOW_S > now)
        assert recent < FACTOR * rate * WINDOW_S or not recent
        if now > begun_at:  # a moment before it would have been too much
            before = now - 1e-6
            assert sum(tokens for at, tokens in sent if at + WINDOW_S > before) >= FACTOR * rate * WINDOW_S
        pacer.on_resumed(0, num_tokens, now)
        sent.append((now, num_tokens))
        now += draw.choice([0.0, 0.0, draw.uniform(0, 2)])


def test_cores_are_paced_one_by_one_and_a_successor_starts_anew() -> None:
    pacer = ResumePacer()
    pacer.on_resumed(0, 1000, 5.0)
    assert (pacer.next_at(0, 10.0, 5.0), pacer.next_at(1, 10.0, 5.0)) == (6.0, 5.0)
    pacer.forget(0)
    assert pacer.next_at(0, 10.0, 5.0) == 5.0
