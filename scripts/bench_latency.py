"""Latency of one request: IN random prompt tokens, OUT answer tokens, nothing else running.

    python scripts/bench_latency.py 135m 128 64 --with-limits

Measured at the client, an AsyncLLM: time to first token from the call, time between tokens (p50, p99), and the decode
rate (OUT - 1) / (last - first token). Once with the engine in its processes and once in_process, in turn. With
--with-limits the decode rate is also given as a share of what the machine allows (bench_limits.py), measured in the
same round. All flags of engine-launch are taken.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from tokenloom import AsyncLLM, SamplingParams
from tokenloom.scripts.bench_limits import LimitsPeer, Rates
from tokenloom.scripts.bench_report import Report, add_json_argument, median, percentile
from tokenloom.scripts.bench_workload import (
    Workload,
    add_model_arguments,
    add_shape_arguments,
    engine_options,
    find_checkpoint,
    vocab_size,
)
from tokenloom.workers.cpu_threads import num_cpu_threads


async def token_times(llm: AsyncLLM, prompt: list[int], num_out: int) -> list[float]:
    """Seconds from the call to each token's arrival; tokens that come together share a time."""
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    times: list[float] = []
    begun = time.perf_counter()
    async for output in llm.generate(prompt, params):
        now = time.perf_counter() - begun
        times += [now] * (len(output.outputs[0].token_ids) - len(times))
    assert len(times) == num_out, f"{len(times)} tokens came, {num_out} were asked for"
    return times


def decode_rate(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


class Mode:
    """One way to run the engine, and what was measured of it."""

    def __init__(self, name: str, llm: AsyncLLM) -> None:
        self.name = name
        self.llm = llm
        self.first_s: list[float] = []
        self.between_s: list[float] = []
        self.rates: list[float] = []
        self.shares: list[float] = []

    def run(self, workload: Workload, seed: int) -> None:
        times = asyncio.run(token_times(self.llm, workload.prompts(seed)[0], workload.num_out))
        self.first_s.append(times[0])
        self.between_s += [after - before for before, after in zip(times[:-1], times[1:], strict=True)]
        self.rates.append(decode_rate(times))


def open_modes(folder: Path, options: dict[str, object]) -> list[Mode]:
    return [
        Mode("processes", AsyncLLM(model=folder, **options)),
        Mode("in_process", AsyncLLM(model=folder, in_process=True, **options)),
    ]


def decode_limit(peer: LimitsPeer, rates: Rates, workload: Workload) -> float:
    """Tokens/s that the machine allows after the first token."""
    first = Workload(1, workload.num_in, 1, workload.vocab_size)
    seconds = peer.limits.seconds(workload, rates, 1 << 30) - peer.limits.seconds(first, rates, 1 << 30)
    return (workload.num_out - 1) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add_shape_arguments(parser, num_requests=None)
    parser.add_argument("--with-limits", action="store_true", help="measure the machine in each round too")
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.num_out < 3:
        parser.error(f"OUT is {arguments.num_out}: times between tokens need at least 3")
    options = engine_options(parser, arguments)
    folder = find_checkpoint(arguments.checkpoint)
    dtype = str(options.setdefault("dtype", "bfloat16"))
    workload = Workload(1, arguments.num_in, arguments.num_out, vocab_size(folder))
    settings = {"model": arguments.checkpoint, "dtype": dtype, "in": workload.num_in, "out": workload.num_out}
    report = Report("latency", {**settings, "rounds": arguments.rounds})
    modes = open_modes(folder, options)
    limits = None
    try:
        if arguments.with_limits:
            device = "cuda" if options.get("device") == "cuda" else "cpu"
            limits = LimitsPeer(folder, dtype, device, num_cpu_threads(None, 1))
        for mode in modes:  # warm up
            asyncio.run(token_times(mode.llm, workload.prompts(seed=-1)[0], 3))
        for seed in range(arguments.rounds):
            limit = decode_limit(limits, limits.measure(), workload) if limits is not None else None
            for mode in modes:
                mode.run(workload, seed)
                if limit is not None:
                    mode.shares.append(mode.rates[-1] / limit)
    finally:
        for mode in modes:
            asyncio.run(mode.llm.close())
        if limits is not None:
            limits.close()
    for mode in modes:
        report.add(
            mode=mode.name,
            ttft_ms=median(mode.first_s) * 1e3,
            itl_p50_ms=percentile(mode.between_s, 50) * 1e3,
            itl_p99_ms=percentile(mode.between_s, 99) * 1e3,
            decode_tokens_per_s=median(mode.rates),
            share_of_limit=median(mode.shares) if mode.shares else None,
        )
    report.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
