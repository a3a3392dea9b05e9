"""Measure what replicas cost on one machine: an engine of --replicas replicas beside one replica with all threads.

    engine-launch bench replicas 135m --rows 16 64

Both engines run all the time and are measured in turn (A B A B), so that one of them is always idle: replicas × ROWS
requests of --in random prompt tokens and --out answer tokens, all submitted at once. A replica has --threads threads,
the other engine as many as all replicas together. Printed: tokens/s, and the ratio of the two as the median of the
rounds. Replicas cost another reading of the weights, and the router; they buy failover. All flags of engine-launch are
taken.
"""

from __future__ import annotations

from tokenloom import LLM
from tokenloom.scripts.bench.contestant import Contestant, Ours, measure_in_turn, median_ratio
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import Workload


def measure(setup: Setup) -> None:
    asked = setup.arguments
    names = (f"{asked.replicas} replicas", "one engine")
    shapes = (
        {"data_parallel_size": asked.replicas, "num_threads": asked.threads},
        {"num_threads": asked.replicas * asked.threads},
    )
    engines = [setup.stack.enter_context(LLM(setup.folder, **setup.options, **shape)) for shape in shapes]
    contestants: list[Contestant] = [Ours(llm, name) for llm, name in zip(engines, names, strict=True)]
    for rows in asked.rows:
        workload = Workload(asked.replicas * rows, asked.num_in, asked.num_out, setup.workload.vocab_size)
        seconds = measure_in_turn(contestants, workload, asked.rounds, setup.report, f"{rows} rows a replica")
        ratio = median_ratio(seconds[names[1]], seconds[names[0]])
        setup.report.note(f"throughput relative to one engine, {rows} rows a replica", ratio)


OPTIONS = {
    "--replicas": (2,),
    "--threads": (1, "of a replica"),
    "--rows": ([16, 64], "requests of a replica"),
    "--in": (128, "prompt tokens"),
    "--out": (64, "answer tokens"),
}
CASE = Case("replicas", measure, OPTIONS, dtype="bfloat16")
