"""Offline throughput: N requests of IN random prompt tokens and OUT answer tokens, all given to LLM.generate at once.

    python scripts/bench_throughput.py 135m 32 128 64 --with-transformers

Measured: seconds from the call to its return, greedy, ignore_eos, new prompts in each round, after one warm-up of the
same shape with two tokens. With --with-transformers the same prompts go to transformers' generate in a process of its
own, in turn with ours (A B A B); the ratio is the median of the rounds' ratios. All flags of engine-launch are taken.
"""

from __future__ import annotations

import argparse
import sys

from tokenloom.scripts.bench_contestant import Contestant, Ours, transformers_peer
from tokenloom.scripts.bench_report import Report, add_json_argument, median
from tokenloom.scripts.bench_workload import (
    Workload,
    add_model_arguments,
    add_shape_arguments,
    device_of,
    engine_options,
    find_checkpoint,
    vocab_size,
)
from tokenloom.workers.cpu_threads import num_cpu_threads

WARM_UP_TOKENS = 2


def measure(contestants: list[Contestant], workload: Workload, rounds: int, report: Report) -> dict[str, list[float]]:
    """Seconds of each round by contestant."""
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    for each in contestants:
        each.generate(workload.prompts(seed=-1), min(WARM_UP_TOKENS, workload.num_out))
    num_out = workload.num_requests * workload.num_out
    for round_number in range(rounds):
        for each in contestants:
            took = each.generate(workload.prompts(seed=round_number), workload.num_out)
            seconds[each.name].append(took)
            report.add(
                round=round_number + 1,
                engine=each.name,
                seconds=took,
                out_tokens_per_s=num_out / took,
                all_tokens_per_s=(num_out + workload.num_requests * workload.num_in) / took,
            )
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add_shape_arguments(parser, num_requests=32)
    parser.add_argument("--with-transformers", action="store_true", help="compare with transformers' generate")
    parser.add_argument("--in-process", action="store_true", help="run the engine in this process")
    add_json_argument(parser)
    arguments = parser.parse_args()
    options = engine_options(parser, arguments)
    folder = find_checkpoint(arguments.checkpoint)
    dtype = str(options.setdefault("dtype", "bfloat16"))
    workload = Workload(arguments.num_requests, arguments.num_in, arguments.num_out, vocab_size(folder))
    settings = {"model": arguments.checkpoint, "dtype": dtype, "N": workload.num_requests, "in": workload.num_in}
    report = Report("throughput", {**settings, "out": workload.num_out})
    contestants: list[Contestant] = []
    try:
        contestants.append(Ours(folder, options, arguments.in_process))
        if arguments.with_transformers:
            threads = num_cpu_threads(arguments.num_threads if "num_threads" in options else None, 1)
            device = device_of(options)
            contestants.append(transformers_peer(folder, dtype, device, threads))
        seconds = measure(contestants, workload, arguments.rounds, report)
    finally:
        for each in contestants:
            each.close()
    ours, *peers = seconds
    for peer in peers:
        ratios = [theirs / mine for mine, theirs in zip(seconds[ours], seconds[peer], strict=True)]
        report.note(f"throughput relative to {peer}", median(ratios))
    report.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
