from __future__ import annotations

import random
import time

import pytest

from tokenloom.ipc.process.awake_clock import MISSED_BEATS, AwakeClock, steady_time
from tokenloom.tests.support.today import seeds

BEAT_S = 0.5


class Time:
    """A monotonic clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", seeds(2, 10))
def test_without_a_suspension_it_equals_the_monotonic_clock(seed: int) -> None:
    rng, time = random.Random(seed), Time()
    clock = AwakeClock(BEAT_S, time)
    for _ in range(1000):
        time.now += rng.uniform(0, MISSED_BEATS * BEAT_S)
        assert clock.look() == pytest.approx(time.now)
    assert clock.num_gaps == 0


@pytest.mark.parametrize("suspended_s", [1.1, 10.0, 86400.0])
def test_a_suspension_of_any_length_counts_as_one_beat(suspended_s: float) -> None:
    time = Time()
    clock = AwakeClock(BEAT_S, time)
    time.now += suspended_s
    assert clock.look() == 100.0 + BEAT_S and clock.num_gaps == 1


@pytest.mark.parametrize("seed", seeds(2, 10))
def test_a_process_with_little_cpu_still_reaches_its_limits(seed: int) -> None:
    rng, time = random.Random(seed), Time()
    clock = AwakeClock(BEAT_S, time)
    before = clock.now
    for num_looks in range(1, 1000):
        time.now += rng.uniform(BEAT_S, 100.0)
        assert before + BEAT_S <= clock.look() <= before + MISSED_BEATS * BEAT_S
        before = clock.now
        assert clock.now >= 100.0 + num_looks * BEAT_S


def test_a_waiting_process_looks_once_a_beat_and_at_the_limit() -> None:
    clock = AwakeClock(BEAT_S, Time())
    assert clock.patience_s(clock.now + 10.0) == BEAT_S
    assert clock.patience_s(clock.now + 0.25) == 0.25
    assert clock.patience_s(clock.now - 1.0) == 0.0


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_steady_time_goes_on_while_the_clock_is_set(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    before, unix_time = steady_time(), time.time
    assert abs(before - unix_time()) < 1800
    monkeypatch.setattr(time, "time", lambda: unix_time() + jump_s)
    assert before <= steady_time() < before + 1800
