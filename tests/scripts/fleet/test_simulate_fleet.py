"""Laws of the fleet simulator: no request is lost under any fault, and its figures are those of a hand calculation."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tokenloom.scripts.fleet.faults import Fault, Kill, Partition, Poison, RollingRestart, Slow, read_faults
from tokenloom.scripts.fleet.policies import POLICIES
from tokenloom.scripts.fleet.replica import LARGE_GPU, FluidReplica, Replica, Sizes
from tokenloom.scripts.fleet.simulation import FleetSimulation
from tokenloom.scripts.fleet.traces import BLOCK, Job, share_cached_by_one

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/fleet/simulate_fleet.py"
POOL = 200_000  # tokens


def conversations(num: int, *, seed: int = 0, rate: float = 3.0) -> list[Job]:
    """Return requests of `num` conversations of 1 to 6 turns, each of which begins with all before it."""
    draw, found = random.Random(seed), list[tuple[float, int, int, list[int]]]()
    fresh = iter(range(1, 1 << 40))
    at = 0.0
    for _ in range(num):
        at += draw.expovariate(rate / 3)
        turn_at, keys = at, [0]  # a system prompt of one block
        for _ in range(draw.randint(1, 6)):
            keys = keys + [next(fresh) for _ in range(draw.randint(2, 12))]
            found.append((turn_at, len(keys) * BLOCK + draw.randint(1, BLOCK - 1), draw.randint(2, 300), keys))
            turn_at += draw.uniform(10, 60)
    return [Job(number, *each) for number, each in enumerate(sorted(found))]


def simulate(
    jobs: Sequence[Job],
    num_replicas: int,
    faults: Sequence[Fault] = (),
    policy: str = "router",
    pool: int = POOL,
    new_replica: Callable[[], Replica] | None = None,
) -> FleetSimulation:
    make = new_replica or (lambda: FluidReplica(LARGE_GPU, Sizes(pool_tokens=pool)))
    router = POLICIES[policy](key_tokens=BLOCK)
    simulation = FleetSimulation(jobs, num_replicas, make, router, faults=faults, capacity_tokens=pool)
    simulation.run()
    return simulation


def share_cached(simulation: FleetSimulation) -> float:
    jobs = simulation.jobs
    return sum(job.num_cached_tokens for job in jobs) / sum(job.num_prompt_tokens for job in jobs)


def test_one_request_takes_its_steps() -> None:
    job = Job(0, 1.0, 5000, 11, list(range(9)))
    simulate([job], 1)
    a, b, c, d, _ = LARGE_GPU
    first_token_s = 3 * a + 5000 * c + (2048 + 4096 + 5000) * d  # a lone prompt has the whole budget of 2048
    assert job.first_token_at == pytest.approx(1.0 + first_token_s)
    decode_s = 10 * (a + b) + d * sum(5001 + i for i in range(10))
    assert job.finished_at == pytest.approx(1.0 + first_token_s + decode_s, rel=1e-3)


def test_a_repeated_prompt_computes_its_last_block_alone() -> None:
    jobs = [Job(number, 100.0 * number, 9 * BLOCK, 2, list(range(9))) for number in range(2)]
    simulate(jobs, 1)
    assert [job.num_cached_tokens for job in jobs] == [0, 8 * BLOCK]


def test_the_router_finds_nine_tenths_of_the_prefixes_that_one_cache_would() -> None:
    jobs = conversations(400)
    pool = 500_000
    bound = share_cached_by_one(jobs, 8 * (pool // BLOCK))
    assert bound > 0.3
    shares = {policy: share_cached(simulate(conversations(400), 8, policy=policy, pool=pool)) for policy in POLICIES}
    assert shares["router"] >= 0.9 * bound
    assert shares["router"] > max(shares["random"], shares["power of two"]) * 2


def test_the_router_answers_sooner_than_policies_that_see_less() -> None:
    ttft: dict[str, list[float]] = {}
    for policy in POLICIES:
        jobs = simulate(conversations(400, rate=6.0), 8, policy=policy).jobs
        ttft[policy] = sorted(job.first_token_at - job.arrived_at for job in jobs)
    for quantile in (0.5, 0.9):
        least = min(ttft, key=lambda policy: ttft[policy][int(quantile * len(ttft[policy]))])
        assert least == "router"


FAULTS: list[list[Fault]] = [
    [Kill(at_s=30, num=3), Kill(at_s=70, num=1, noticed_after_s=3)],
    [Kill(at_s=30, num=8, back_after_s=20)],  # all of them
    [Slow(at_s=20, num=2, factor=10, for_s=60)],
    [Partition(at_s=30, num=3, for_s=20), Kill(at_s=31, num=4, back_after_s=5)],
    [RollingRestart(at_s=20, every_s=5, drain_s=4, back_after_s=9), Kill(at_s=33, num=2)],
]


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: "-".join(type(each).__name__ for each in faults))
@pytest.mark.parametrize("policy", list(POLICIES))
def test_no_request_is_lost(faults: list[Fault], policy: str) -> None:
    jobs = conversations(150, rate=12.0)
    simulation = simulate(jobs, 8, faults, policy)
    assert simulation.num_unfinished == 0 and simulation.jobs == jobs
    for job in jobs:
        assert job.num_done == job.num_output_tokens and job.num_losses == 0
        assert 0 <= job.num_cached_tokens < job.num_prompt_tokens
        assert job.arrived_at < job.first_token_at <= job.finished_at
    resumed = [job for job in jobs if job.num_resumes]
    assert bool(resumed) == (type(faults[0]) is not Slow)
    assert simulation.num_recomputed_tokens <= simulation.num_lost_tokens


def test_contexts_that_nobody_else_has_are_computed_again_as_a_whole() -> None:
    jobs = [Job(number, 0.01 * number, 3000, 400, [10 * number + i for i in range(5)]) for number in range(20)]
    simulation = simulate(jobs, 2, [Kill(at_s=4.0, num=1)])
    resumed = [job for job in jobs if job.num_resumes]
    assert len(resumed) >= 5 and all(job.gap_s > 0.1 for job in resumed if job.first_token_at < 4.0)
    assert simulation.num_recomputed_tokens == simulation.num_lost_tokens > 3000 * len(resumed)


def test_a_request_that_ends_replicas_is_given_up_after_three_and_no_other_is() -> None:
    simulation = simulate(conversations(60), 8, [Poison(at_s=20)])
    (poison,) = [job for job in simulation.jobs if job.is_poison]
    assert [job for job in simulation.jobs if job.is_convicted] == [poison]
    assert poison.num_losses == poison.num_resumes == 3
    assert simulation.num_unfinished == 0


def test_a_slow_replica_is_avoided() -> None:
    jobs = conversations(400)
    simulation = simulate(jobs, 4, [Slow(at_s=0, num=1, factor=6, for_s=10_000)])
    counts = sorted(sum(job.core == core for job in simulation.jobs) for core in range(4))
    assert counts[0] < 0.6 * counts[1]


def test_faults_are_read_from_json_and_refused_by_name() -> None:
    text = '[{"kind": "kill", "at_s": 3, "num": 2}, {"kind": "poison", "at_s": 4}]'
    assert read_faults(text) == [Kill(at_s=3, num=2), Poison(at_s=4)]
    with pytest.raises(SystemExit, match="numm"):
        read_faults('[{"kind": "kill", "at_s": 3, "numm": 2}]')


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": int(1000 * job.arrived_at),
            "input_length": job.num_prompt_tokens,
            "output_length": job.num_output_tokens,
            "hash_ids": list(job.keys),
        }
        for job in conversations(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60, cwd="/")


def test_the_command_writes_the_same_csv_for_the_same_seed(trace: Path, tmp_path: Path) -> None:
    faults = '[{"kind": "kill", "at_s": 20, "num": 1}]'
    tables = []
    for name in ("one.csv", "two.csv"):
        options = ("--replicas", "2", "4", "--duration-s", "60", "--faults", faults, "--csv", str(tmp_path / name))
        done = run(str(trace), *options)
        assert done.returncode == 0, done.stderr
        with (tmp_path / name).open(newline="") as file:
            tables.append([row | {"run_s": ""} for row in csv.DictReader(file)])
    assert tables[0] == tables[1]
    assert [(row["replicas"], row["policy"]) for row in tables[0]] == [(n, p) for n in "24" for p in POLICIES]
    assert all(row["lost"] == row["given_up"] == "0" for row in tables[0])


def test_a_bad_trace_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0}\n')
    done = run(str(path))
    assert done.returncode != 0 and "line 1: no request" in done.stderr and "Traceback" not in done.stderr
