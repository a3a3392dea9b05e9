"""Whatever mix of guilty and innocent requests runs: the guilty are found one by one, the innocent get on."""

from __future__ import annotations

import random

import pytest

from tokenloom.core.features.crash_isolation import CrashIsolation
from tokenloom.core.request import State
from tokenloom.core.scheduling.step.rows import Rows
from tokenloom.tests.core.harness import make_request


def simulate(num_requests: int, guilty: dict[int, int], length: int) -> tuple[list[int], int]:
    """Run requests in lockstep; request k in `guilty` kills the group when it has guilty[k] tokens. Return the failed
    requests and the number of crashes."""
    quarantine, requests = CrashIsolation(Rows(1, 1, 1)), [make_request(key) for key in range(num_requests)]
    convicted, num_losses = [], 0
    for num_turns in range(10_000):
        alive = [request for request in requests if request.state is not State.FINISHED]
        if not alive:
            quarantine.on_progress({})
            assert not quarantine.crashes_by_request, "what is over is remembered"
            assert num_turns <= length + 2 * num_losses, "the innocent wait for more than a token of each trial"
            return convicted, num_losses
        step = [request for request in alive if not quarantine.holds(request)]
        assert step, "everyone is held"
        if any(guilty.get(request.key) == request.num_tokens for request in step):
            num_losses += 1
            culprit = quarantine.on_loss({request: request.num_tokens for request in step})
            if culprit is not None:
                convicted.append(culprit.key)
                culprit.move(State.FINISHED)
            continue
        for request in step:
            request.num_tokens += 1
            if request.num_tokens > length:
                request.move(State.FINISHED)
        if quarantine.crashes_by_request:
            quarantine.on_progress({request: request.num_tokens for request in step})
    raise AssertionError("it does not end")


def test_a_single_crash_makes_no_suspects() -> None:
    quarantine, requests = CrashIsolation(Rows(1, 1, 1)), [make_request(key) for key in range(4)]
    assert quarantine.on_loss(dict.fromkeys(requests, 1)) is None
    assert not any(quarantine.holds(request) for request in requests)
    quarantine.on_progress(dict.fromkeys(requests, 2))
    assert not quarantine.crashes_by_request


@pytest.mark.parametrize("num_requests", [1, 2, 7, 64])
def test_the_request_that_crashes_workers_is_found_in_logarithmic_time(num_requests: int) -> None:
    for at in (1, 5):
        convicted, num_losses = simulate(num_requests, {num_requests // 2: at}, 10)
        assert convicted == [num_requests // 2]
        assert num_losses <= 4 + num_requests.bit_length()


def test_all_requests_that_crash_workers_fail_and_no_others() -> None:
    rng = random.Random(0)
    for _ in range(200):
        num_requests = rng.randrange(1, 40)
        guilty = {key: rng.randrange(1, 8) for key in rng.sample(range(num_requests), rng.randrange(num_requests + 1))}
        convicted, _ = simulate(num_requests, guilty, 8)
        assert sorted(convicted) == sorted(guilty)


def test_new_requests_do_not_hide_the_request_that_crashes_workers() -> None:
    quarantine, (guilty, *others) = CrashIsolation(Rows(1, 1, 1)), [make_request(key) for key in range(4)]
    for other in others:
        assert not quarantine.has_suspects
        quarantine.on_loss({guilty: 1, other: 1})
        if quarantine.has_suspects:
            break
    assert not quarantine.holds(guilty) and quarantine.holds(other)


def test_aborting_all_suspects_admits_the_others() -> None:
    quarantine, requests = CrashIsolation(Rows(1, 1, 1)), [make_request(key) for key in range(4)]
    for _ in range(2):
        quarantine.on_loss(dict.fromkeys(requests, 1))
    assert [quarantine.holds(request) for request in requests] == [False, False, True, True]
    for request in requests[:2]:
        request.move(State.FINISHED)
    assert [quarantine.holds(request) for request in requests[2:]] == [False, False]
