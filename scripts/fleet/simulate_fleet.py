r"""Simulate a fleet of replicas behind the engine's router, on a trace, in virtual time.

    python scripts/fleet/simulate_fleet.py TRACE.jsonl --replicas 8 64 1000
    python scripts/fleet/simulate_fleet.py TRACE.jsonl --replicas 64 \
        --faults '[{"kind": "kill", "at_s": 100, "num": 9}]'

TRACE is in the form that traces.py describes, faults in that of faults.py. Each tenant of
the fleet has the trace with prompts of its own; there are as many as the load asks for. For each size and policy: the
share of prompt tokens found in a replica's prefix cache, that share over the one of a single cache as large as all
together, seconds to the first token, and tokens computed by the busiest replica over the mean; with faults also
requests resumed, given up and lost, the wait for a token after a loss, and the p99 of the time to the first token by
the time of arrival, beside that of a calm run. Requests that come in the first part of the time (--warm-up) fill the
caches; only the share of a single cache counts them.
"""

from __future__ import annotations

import csv
import itertools
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenloom.frontend.server.replicas.prefix_index import MAX_ENTRIES
from tokenloom.scripts.bench.report import Cell, Report, percentile
from tokenloom.scripts.bench.runner import REQUIRED, read_options
from tokenloom.scripts.fleet.exact_replica import ExactReplica, spec_of
from tokenloom.scripts.fleet.faults import Fault, read_faults
from tokenloom.scripts.fleet.policies import POLICIES, LateIndex
from tokenloom.scripts.fleet.replica import LARGE_GPU, FluidReplica, Replica, Sizes, StepCost
from tokenloom.scripts.fleet.simulation import FleetSimulation
from tokenloom.scripts.fleet.traces import BLOCK, Entry, Job, jobs_of, read_trace, share_cached_by_one

WINDOWS_S = (0, 10, 20, 30, 45, 60)  # after the first fault


OPTIONS = {
    "trace": (REQUIRED, "", Path),
    "--replicas": ([8, 64], "sizes of the fleet"),
    "--policies": (list(POLICIES),),
    "--exact": (False, "the engine's own scheduler in each replica; up to 32"),
    "--load": (0.43, "requests per second and replica"),
    "--speed": (10.0, "of a tenant, times the trace's"),
    "--duration-s": (360.0, "of the arrivals"),
    "--warm-up": (0.25, "part of the duration"),
    "--pool-tokens": (Sizes().pool_tokens, "of a replica's KV pool"),
    "--max-num-batched-tokens": (Sizes().max_num_batched_tokens,),
    "--max-num-seqs": (Sizes().max_num_seqs,),
    "--step-cost": (",".join(f"{each:.3g}" for each in LARGE_GPU), "A,B,C,D,E: seconds"),
    "--index-entries": (MAX_ENTRIES, "limit of the router's index"),
    "--index-delay-s": (0.0, "until the index knows of a prompt"),
    "--faults": ((), "a list of faults in JSON, or its file", read_faults),
    "--seed": (0,),
    "--csv": (None, "also write the table as CSV", Path),
}


class Fleet:
    """Runner of simulations of one trace with the given options."""

    def __init__(self, trace: Sequence[Entry], arguments) -> None:  # type: ignore[no-untyped-def]
        self._trace, self._arguments = trace, arguments
        self._cost = StepCost(*map(float, arguments.step_cost.split(",")))
        self._sizes = Sizes(arguments.pool_tokens, arguments.max_num_seqs, arguments.max_num_batched_tokens)
        length_s = trace[-1].at_s - trace[0].at_s + 1.0
        self._rate = arguments.speed * len(trace) / length_s  # of a tenant
        self._spec = spec_of(self._sizes) if arguments.exact else None

    def _new_replica(self) -> Replica:
        if self._spec is not None:
            return ExactReplica(self._cost, self._sizes, self._spec)
        return FluidReplica(self._cost, self._sizes)

    def jobs(self, num_replicas: int) -> list[Job]:
        options = self._arguments
        num_tenants = max(round(options.load * num_replicas / self._rate), 1)
        speed = options.speed * options.load * num_replicas / (self._rate * num_tenants)
        found = jobs_of(
            self._trace, num_tenants=num_tenants, speed=speed, duration_s=options.duration_s, seed=options.seed
        )
        return list(found)

    def run(self, num_replicas: int, policy: str, faults: Sequence[Fault]) -> tuple[FleetSimulation, dict[str, Cell]]:
        """Return a finished simulation, and its figures."""
        options = self._arguments
        router = POLICIES[policy](key_tokens=BLOCK, max_entries=options.index_entries, seed=options.seed)
        simulation = FleetSimulation(
            self.jobs(num_replicas),
            num_replicas,
            self._new_replica,
            router,
            faults=faults,
            capacity_tokens=self._sizes.pool_tokens,
            seed=options.seed,
        )
        begun_at = time.monotonic()
        if options.index_delay_s:
            router.index = LateIndex(options.index_entries, options.index_delay_s, lambda: simulation.now)
        simulation.run()
        counted = [job for job in simulation.jobs if job.arrived_at >= options.warm_up * options.duration_s]
        return simulation, figures(counted) | {"run_s": time.monotonic() - begun_at}


def figures(jobs: Sequence[Job]) -> dict[str, Cell]:
    """Return the share of prompt tokens found cached, percentiles of the time to the first token and between tokens,
    and the spread of load."""
    started = [job for job in jobs if job.num_cached_tokens >= 0]
    num_prompt = sum(job.num_prompt_tokens for job in started)
    computed = Counter[int]()
    for job in started:
        computed[job.core] += job.num_prompt_tokens - job.num_cached_tokens
    ttft = [job.first_token_at - job.arrived_at for job in jobs if job.first_token_at >= 0]
    between = [
        (job.finished_at - job.first_token_at) / (job.num_output_tokens - 1)
        for job in jobs
        if job.finished_at >= 0 and job.num_output_tokens > 1 and not job.is_convicted
    ]
    return {
        "cached": sum(job.num_cached_tokens for job in started) / max(num_prompt, 1),
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p90_s": percentile(ttft, 90),
        "ttft_p99_s": percentile(ttft, 99),
        "between_tokens_p50_ms": 1000 * percentile(between, 50),
        "busiest_over_mean": max(computed.values(), default=0) * len(computed) / max(sum(computed.values()), 1),
    }


def figures_of_faults(simulation: FleetSimulation, calm: FleetSimulation, at_s: float) -> dict[str, Cell]:
    """Return the fate of the requests, and p99 of the time to the first token by the time of arrival after the first
    fault, beside that of the same requests in a calm run."""
    jobs = simulation.jobs
    gaps = [job.gap_s for job in jobs if job.gap_s]
    found: dict[str, Cell] = {
        "resumed": sum(job.num_resumes > 0 for job in jobs),
        "given_up": sum(job.is_convicted for job in jobs),
        "lost": sum(job.finished_at < 0 for job in jobs),
        "gap_p50_s": percentile(gaps, 50),
        "gap_p99_s": percentile(gaps, 99),
        "recomputed_of_lost": simulation.num_recomputed_tokens / max(simulation.num_lost_tokens, 1),
    }
    for begin, end in itertools.pairwise(WINDOWS_S):
        both = [p99_of_arrivals(run.jobs, at_s + begin, at_s + end) for run in (simulation, calm)]
        found[f"p99_{begin}_{end}_s"] = both[0]
        found[f"calm_{begin}_{end}_s"] = both[1]
    return found


def p99_of_arrivals(jobs: Sequence[Job], begin: float, end: float) -> float:
    """Return p99 of the seconds to the first token of the requests that came in [begin, end)."""
    found = [job for job in jobs if job.first_token_at >= 0 and begin <= job.arrived_at < end]
    return percentile([job.first_token_at - job.arrived_at for job in found], 99)


def write_csv(rows: Sequence[dict[str, Cell]], path: Path) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    arguments = read_options(__doc__, OPTIONS)
    fleet = Fleet(read_trace(arguments.trace), arguments)
    shown = ("load", "duration_s", "pool_tokens", "step_cost", "seed")
    report = Report("fleet", {"trace": arguments.trace.name} | {name: getattr(arguments, name) for name in shown})
    rows: list[dict[str, Cell]] = []
    for num_replicas in arguments.replicas:
        jobs = fleet.jobs(num_replicas)
        bound = share_cached_by_one(jobs, num_replicas * (arguments.pool_tokens // BLOCK))
        for policy in arguments.policies:
            calm, found = fleet.run(num_replicas, policy, ())
            row: dict[str, Cell] = {"replicas": num_replicas, "policy": policy, "requests": len(jobs), **found}
            row["of_one_cache"] = calm_share(calm) / bound if bound else None
            if arguments.faults:
                struck, found = fleet.run(num_replicas, policy, arguments.faults)
                row |= found | figures_of_faults(struck, calm, min(fault.at_s for fault in arguments.faults))
            rows.append(row)
            report.add(**row)
            print(row, file=sys.stderr)
    report.publish(arguments.json)
    if arguments.csv is not None:
        write_csv(rows, arguments.csv)
    return 0


def calm_share(simulation: FleetSimulation) -> float:
    """Return the share of prompt tokens found cached, the warm-up included."""
    num_prompt = sum(job.num_prompt_tokens for job in simulation.jobs)
    return sum(max(job.num_cached_tokens, 0) for job in simulation.jobs) / max(num_prompt, 1)


if __name__ == "__main__":
    sys.exit(main())
