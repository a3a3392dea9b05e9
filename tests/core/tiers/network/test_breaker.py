"""The breaker: three failures open it, the period doubles to a limit, one request at a time tests the place."""

from __future__ import annotations

from tokenloom.core.tiers.network.breaker import Breaker
from tokenloom.core.tiers.pause import LONGEST_S


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def broken(clock: Clock) -> Breaker:
    breaker = Breaker(clock=clock)
    assert [breaker.admit() and breaker.failed() for _ in range(3)] == [False, False, True]
    return breaker


def test_three_failures_in_a_row_open_it_and_two_with_a_success_between_do_not() -> None:
    breaker = Breaker(clock=Clock())
    for has_failed in (True, True, False, True, True):
        assert breaker.admit()
        assert not (breaker.failed() if has_failed else breaker.succeeded())
    assert not breaker.is_open
    assert breaker.admit() and breaker.failed()
    assert breaker.is_open and breaker.is_broken and not breaker.admit()


def test_the_period_doubles_up_to_its_limit_and_starts_again_after_a_success() -> None:
    clock = Clock()
    breaker = broken(clock)
    periods = []
    for _ in range(9):
        start = clock.now
        while not breaker.admit():
            clock.now += 0.5
        periods.append(clock.now - start)
        assert not breaker.failed()
    assert periods == [5, 10, 20, 40, 80, 160, LONGEST_S, LONGEST_S, LONGEST_S]
    clock.now += LONGEST_S
    assert breaker.admit() and breaker.succeeded() and not breaker.is_broken
    assert [breaker.admit() and breaker.failed() for _ in range(3)] == [False, False, True]
    clock.now += 4.9
    assert not breaker.admit()
    clock.now += 0.1
    assert breaker.admit()


def test_one_request_at_a_time_passes_after_a_failure() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    assert breaker.admit() and breaker.admit()  # any number while all is well
    breaker.failed()
    assert breaker.admit() and not breaker.admit()
    breaker.cancelled()
    assert breaker.admit() and not breaker.admit()
    breaker.succeeded()
    assert breaker.admit() and breaker.admit()


def test_a_success_of_another_kind_forgives_no_failure() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    for is_last in (False, False, True):
        assert breaker.admit() and not breaker.succeeded("find")
        assert breaker.admit() and breaker.failed("load") is is_last
    clock.now += 5
    assert breaker.admit() and not breaker.succeeded("find") and breaker.is_broken
    assert breaker.admit() and not breaker.failed("load")
    clock.now += 9.9
    assert not breaker.admit()
    clock.now += 0.1
    assert breaker.admit() and breaker.succeeded("load") and not breaker.is_broken


def test_failures_of_requests_that_began_before_it_opened_do_not_lengthen_the_period() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    assert all(breaker.admit() for _ in range(8))
    assert [breaker.failed() for _ in range(8)] == [False, False, True, *[False] * 5]
    clock.now += 5
    assert breaker.admit()
