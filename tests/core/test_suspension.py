"""Suspensions of the core and the limits of steps and grammars; the test sets the time."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.core.engine import BEAT_S
from tokenloom.core.hang_detector import FIRST_LIMIT_S, MARGIN, MAX_EXCUSES, MIN_LIMIT_S, HangDetector
from tokenloom.tests.core.features.grammar.grammar_harness import GrammarHarness
from tokenloom.tests.core.harness import Harness


class Suspension:
    """A core with a step in flight and the limit MIN_LIMIT_S, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.harness = Harness(monotonic=lambda: self.now)
        self.core = self.harness.core
        self.harness.add(0, [1, 2, 3, 4], 4)
        self.harness.run()
        self.harness.add(1, [5, 6, 7, 8], 4)
        self.core.step()

    def let_pass(self, seconds: float) -> bool:
        """The core's loop turns once after so long; whether the workers are taken to hang then."""
        self.now += seconds
        now = self.core.look()
        return self.core.overdue_at is not None and now > self.core.overdue_at

    def seconds_to_verdict(self, turn_s: float = BEAT_S) -> float:
        begun = self.now
        while not self.let_pass(turn_s):
            assert self.now < begun + 100 * MIN_LIMIT_S, "a hanging worker is never found"
        return self.now - begun


def test_a_step_that_hangs_is_found_at_its_limit() -> None:
    assert Suspension().seconds_to_verdict() == pytest.approx(MIN_LIMIT_S, abs=BEAT_S)


@pytest.mark.parametrize("suspended_s", [2 * BEAT_S + 0.1, 10.0, 3600.0])
def test_a_suspension_restarts_the_time_limit_of_a_step(suspended_s: float) -> None:
    case = Suspension()
    while case.now < MIN_LIMIT_S - BEAT_S:
        assert not case.let_pass(BEAT_S)
    assert not case.let_pass(suspended_s)
    assert case.seconds_to_verdict() == pytest.approx(MIN_LIMIT_S, abs=BEAT_S)


def test_a_core_that_is_starved_of_cpu_still_finds_workers_that_hang() -> None:
    """Each of its turns comes so late that it looks like a suspension."""
    turns = Suspension().seconds_to_verdict(turn_s=3.0) / 3.0
    assert turns <= MAX_EXCUSES + MIN_LIMIT_S / BEAT_S + 1


def test_the_time_of_a_step_that_was_suspended_does_not_raise_the_limit_of_others() -> None:
    case = Suspension()
    case.let_pass(1000.0)
    result = case.harness.worker.answer()
    assert result is not None
    case.core.on_result(msgspec.structs.replace(result, execute_s=1000.0))
    case.core.step()
    assert case.seconds_to_verdict() == pytest.approx(MIN_LIMIT_S, abs=BEAT_S)
    case.harness.run()
    case.harness.check(1)


def test_a_grammar_does_not_fail_because_the_core_was_suspended_while_it_compiled() -> None:
    now = 0.0
    harness = GrammarHarness(monotonic=lambda: now)
    harness.ask(0, [1, 2, 3], 8, "3,8")
    for _ in range(3):
        now += 1000.0
        harness.core.grammars.take()
        assert not harness.finished
    harness.run_to_the_end()


def test_the_limit_grows_with_longer_steps_and_with_more_tokens() -> None:
    watch = HangDetector()
    assert watch.limit_s(1) == FIRST_LIMIT_S
    watch.on_step(1, 0.01)
    assert watch.limit_s(1) == MIN_LIMIT_S
    watch.on_step(1, 1.0)
    assert watch.limit_s(1) == MARGIN
    assert watch.limit_s(2048) == MARGIN * 2048
    watch.on_step(2048, 3.0)
    assert watch.limit_s(2048) == MARGIN * 3.0
    assert watch.limit_s(4096) == MARGIN * 6.0


def test_the_operators_limit_is_taken_as_it_is() -> None:
    watch = HangDetector(0.5)
    watch.on_step(1, 100.0)
    assert watch.limit_s(1) == 0.5
