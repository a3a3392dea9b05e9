"""Latency of one request: IN random prompt tokens, OUT answer tokens, nothing else running.

    python scripts/bench_latency.py 135m 128 64 --with-limits

Measured where the client's channel gets each token: time to first token from the submit, time between tokens (p50,
p99), and the decode rate (OUT - 1) / (last - first token). Once with the engine in its processes and once in_process,
in turn. With --with-limits the decode rate is also given as a share of what the machine allows (bench_limits.py),
measured in the same round. All flags of engine-launch are taken.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue

from tokenloom import SamplingParams
from tokenloom.frontend.channel import Channel
from tokenloom.frontend.engine_options import config_from_keywords
from tokenloom.frontend.llm import open_in_process, open_private
from tokenloom.frontend.open_request import Update
from tokenloom.frontend.prompts import new_submit
from tokenloom.ipc.codec import num_ids
from tokenloom.ipc.config import EngineConfig
from tokenloom.ipc.messages import Delta
from tokenloom.scripts.bench_contestant import ANSWER_TIMEOUT_S
from tokenloom.scripts.bench_limits import LimitsPeer, Rates
from tokenloom.scripts.bench_report import Report, add_json_argument, median, percentile
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

_request_numbers = itertools.count()


def token_times(channel: Channel, prompt: list[int], num_out: int) -> list[float]:
    """Seconds from the submit to each token's arrival; tokens of one message share a time."""
    arrivals: SimpleQueue[tuple[float, Update]] = SimpleQueue()
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    times: list[float] = []
    begun = time.perf_counter()
    submit = new_submit(f"latency-{next(_request_numbers)}", {"prompt_token_ids": prompt}, params)
    channel.submit(submit, lambda update: arrivals.put((time.perf_counter() - begun, update)))
    while len(times) < num_out:
        when, update = channel.wait(arrivals, ANSWER_TIMEOUT_S)
        if isinstance(update, Exception):
            raise update
        if isinstance(update, Delta):
            times += [when] * num_ids(update.token_ids)
    return times


class Mode:
    """One way to run the engine, and what was measured of it."""

    def __init__(self, name: str, opened: tuple[Channel, Callable[[], None]]) -> None:
        self.name = name
        self.channel, self.close = opened
        self.first_s: list[float] = []
        self.between_s: list[float] = []
        self.rates: list[float] = []
        self.shares: list[float] = []

    def run(self, workload: Workload, seed: int, limit: float | None) -> None:
        """One request. limit: tokens/s that the machine allows, if it was measured."""
        times = token_times(self.channel, workload.prompts(seed)[0], workload.num_out)
        self.first_s.append(times[0])
        self.between_s += [after - before for before, after in itertools.pairwise(times)]
        self.rates.append((len(times) - 1) / (times[-1] - times[0]))
        if limit is not None:
            self.shares.append(self.rates[-1] / limit)


def decode_limit(peer: LimitsPeer, rates: Rates, workload: Workload) -> float:
    """Tokens/s that the machine allows after the first token."""
    first = Workload(1, workload.num_in, 1, workload.vocab_size)
    seconds = peer.limits.seconds(workload, rates, 1 << 30) - peer.limits.seconds(first, rates, 1 << 30)
    return (workload.num_out - 1) / seconds


def measure(config: EngineConfig, workload: Workload, rounds: int, limits: LimitsPeer | None) -> list[Mode]:
    """Both modes, in turn; the machine's rates before them in each round."""
    modes: list[Mode] = []
    try:
        modes.append(Mode("processes", open_private(config)))
        modes.append(Mode("in_process", open_in_process(config)))
        for mode in modes:  # warm up
            token_times(mode.channel, workload.prompts(seed=-1)[0], 3)
        for seed in range(rounds):
            limit = decode_limit(limits, limits.measure(), workload) if limits is not None else None
            for mode in modes:
                mode.run(workload, seed, limit)
    finally:
        for mode in modes:
            mode.close()
    return modes


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
    device = device_of(options)
    limits = LimitsPeer(folder, dtype, device, num_cpu_threads(None, 1)) if arguments.with_limits else None
    try:
        modes = measure(config_from_keywords("LLM", folder, options), workload, arguments.rounds, limits)
    finally:
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
