"""Measure offline throughput: N requests of IN random prompt tokens and OUT answer tokens, all in one LLM.generate.

    engine-launch bench throughput 135m 32 128 64 --with-transformers

Measured: seconds from the call to its return, greedy, ignore_eos, new prompts in each round, after one warm-up of the
same shape with a few tokens. With --with-transformers the same prompts go to transformers' generate in a process of its
own, in turn with ours (A B A B); the ratio is the median of the rounds' ratios. All flags of engine-launch are taken.
"""

from __future__ import annotations

from tokenloom import LLM
from tokenloom.scripts.bench.contestant import Contestant, Ours, measure_in_turn, median_ratio, transformers_peer
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.workers.machine.cpu_threads import num_cpu_threads


def measure(setup: Setup) -> None:
    asked = setup.arguments
    llm = setup.stack.enter_context(LLM(setup.folder, in_process=asked.in_process, **setup.options))
    contestants: list[Contestant] = [Ours(llm, "tokenloom in_process" if asked.in_process else "tokenloom")]
    if asked.with_transformers:
        threads = num_cpu_threads(asked.num_threads if "num_threads" in setup.options else None, 1)
        contestants.append(transformers_peer(setup.folder, setup.dtype, setup.device, threads))
        setup.stack.callback(contestants[-1].close)
    ours, *peers = (seconds := measure_in_turn(contestants, setup.workload, asked.rounds, setup.report))
    for peer in peers:
        setup.report.note(f"throughput relative to {peer}", median_ratio(seconds[peer], seconds[ours]))


OPTIONS = {
    "--with-transformers": (False, "compare with transformers' generate"),
    "--in-process": (False, "run the engine in this process"),
}
CASE = Case("throughput", measure, OPTIONS, num_requests=32, dtype="bfloat16")
