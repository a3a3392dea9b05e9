"""Replicas that run the engine's own scheduler: fluid ones agree with them, and they lose no request either."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tokenloom.scripts.bench.report import percentile
from tokenloom.scripts.fleet.exact_replica import ExactReplica, spec_of, tokens_of
from tokenloom.scripts.fleet.faults import Fault, Kill, Partition, Poison, Slow
from tokenloom.scripts.fleet.replica import LARGE_GPU, Sizes
from tokenloom.scripts.fleet.simulation import FleetSimulation
from tokenloom.scripts.fleet.traces import BLOCK, Job
from tokenloom.tests.scripts.fleet.test_simulate_fleet import POOL, conversations, share_cached, simulate

SIZES = Sizes(pool_tokens=POOL)


def simulate_exactly(jobs: Sequence[Job], num_replicas: int, faults: Sequence[Fault] = ()) -> FleetSimulation:
    spec = spec_of(SIZES)
    return simulate(jobs, num_replicas, faults, new_replica=lambda: ExactReplica(LARGE_GPU, SIZES, spec))


def figures(simulation: FleetSimulation) -> list[float]:
    """Return the share of cached prompt tokens, p50 and p90 of the time to the first token, and the mean duration."""
    jobs = simulation.jobs
    ttft = [job.first_token_at - job.arrived_at for job in jobs]
    duration = sum(job.finished_at - job.arrived_at for job in jobs) / len(jobs)
    return [share_cached(simulation), percentile(ttft, 50), percentile(ttft, 90), duration]


def agree(num_conversations: int, num_replicas: int, rate: float) -> None:
    fluid, exact = (
        run(conversations(num_conversations, rate=rate), num_replicas) for run in (simulate, simulate_exactly)
    )
    assert figures(fluid) == pytest.approx(figures(exact), rel=0.1)


def test_fluid_replicas_agree_with_exact_ones_within_a_tenth() -> None:
    agree(60, 4, rate=9.0)


@pytest.mark.nightly
@pytest.mark.parametrize("rate", [20.0, 40.0])
def test_sixteen_fluid_replicas_agree_with_exact_ones_within_a_tenth(rate: float) -> None:
    agree(400, 16, rate)


FAULTS: list[list[Fault]] = [
    [Kill(at_s=5, num=2, back_after_s=4), Slow(at_s=6, num=1)],
    [Partition(at_s=5, num=2, for_s=6)],
    [Poison(at_s=5)],
]


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: type(faults[0]).__name__)
def test_no_request_is_lost_by_the_engines_own_scheduler(faults: list[Fault]) -> None:
    jobs = conversations(25, rate=12.0)
    simulation = simulate_exactly(jobs, 4, faults)
    assert simulation.num_unfinished == 0 and simulation.jobs == jobs
    given_up = [job for job in jobs if job.is_convicted]
    assert given_up == [job for job in jobs if job.is_poison]
    assert all(job.num_done == job.num_output_tokens for job in jobs if job not in given_up)
    assert any(job.num_resumes for job in jobs)


def test_prompts_share_tokens_exactly_as_far_as_their_keys() -> None:
    first = Job(0, 0.0, 3 * BLOCK + 9, 5, [5, 1 << 45, 3])
    second = Job(1, 0.0, 3 * BLOCK + 9, 5, [5, 1 << 45, 4])
    same = tokens_of(first) == tokens_of(second)
    assert same[: 2 * BLOCK].all() and not same[2 * BLOCK] and not same[3 * BLOCK :].any()
