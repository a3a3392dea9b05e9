from __future__ import annotations

from itertools import pairwise

from tokenloom.frontend.launcher.supervisor.replicas.restart_policy import MAX_DELAY_S, MAX_FAILURES, RestartPolicy


def test_restart_delays_grow_up_to_a_limit_and_end_after_failures_in_a_row() -> None:
    policy = RestartPolicy()
    delays = [policy.on_failure() for _ in range(MAX_FAILURES + 1)]
    assert delays[0] == 0.0 and delays[-1] is None
    waits = [delay for delay in delays if delay is not None]
    assert len(waits) == MAX_FAILURES == policy.num_restarts
    assert all(one < other or one == MAX_DELAY_S for one, other in pairwise(waits)) and max(waits) <= MAX_DELAY_S


def test_a_process_that_ran_long_enough_resets_the_count_if_steps_say_nothing_about_it() -> None:
    policy = RestartPolicy(steady_s=30.0, counts_steps=False)
    for _ in range(MAX_FAILURES):
        assert policy.on_failure(29.0) is not None
        policy.on_progress()
    assert policy.on_failure(29.0) is None
    assert policy.on_failure(30.0) == 0.0


def test_a_replica_is_steady_by_its_steps_or_by_its_time_if_it_has_no_work() -> None:
    policy = RestartPolicy(steady_s=30.0)
    for _ in range(2 * MAX_FAILURES):
        assert policy.on_failure(1.0) == 0.0
        policy.on_progress()
    for _ in range(2 * MAX_FAILURES):
        assert policy.on_failure(30.0) == 0.0
    assert policy.num_restarts == 4 * MAX_FAILURES


def test_a_loss_with_a_host_is_no_failure_and_excuses_the_last_one() -> None:
    policy = RestartPolicy()
    for _ in range(3 * MAX_FAILURES):
        assert policy.on_failure() == 0.0
        assert policy.on_failure(None) == 0.0
    assert policy.num_restarts == 6 * MAX_FAILURES
