"""Measure the latency of one request: IN random prompt tokens, OUT answer tokens, nothing else running.

    engine-launch bench latency 135m 128 64 --with-limits

Measured at the client's transport: time to first token from the submit, time between tokens (p50,
p99), and the decode rate (OUT - 1) / (last - first token). Once with the engine in its processes and once in_process,
in turn. With --with-limits the decode rate is also given as a share of the machine's limit (limits.py), measured
in the same round. All flags of engine-launch are taken.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from tokenloom.frontend.client.transport import Transport
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.frontend.llm import open_in_process, open_private
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.cases.mixed import Load
from tokenloom.scripts.bench.limits import LimitsPeer
from tokenloom.scripts.bench.report import median, percentile
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import Workload
from tokenloom.workers.machine.cpu_threads import num_cpu_threads


def token_times(transport: Transport, prompt: list[int], num_out: int) -> list[float]:
    """Submit a prompt; return the seconds until each token arrived. Tokens of one message share a time."""
    load, begun = Load(transport), time.perf_counter()
    load.submit(prompt, num_out)
    load.run_until(lambda: len(load.times[0]) >= num_out)
    return [when - begun for when in load.times[0]]


class Mode:
    """One way to run the engine, with its measurements."""

    def __init__(self, name: str, opened: tuple[Transport, Callable[[], None]]) -> None:
        self.name = name
        self.transport, self.close = opened
        self.first_s: list[float] = []
        self.between_s: list[float] = []
        self.rates: list[float] = []
        self.shares: list[float] = []

    def run(self, workload: Workload, number: int, limit: float | None) -> None:
        """Measure one request. limit: the machine's limit in tokens/s, if it was measured."""
        times = token_times(self.transport, workload.prompts(number)[0], workload.num_out)
        self.first_s.append(times[0])
        self.between_s += [after - before for before, after in itertools.pairwise(times)]
        self.rates.append((len(times) - 1) / (times[-1] - times[0]))
        if limit is not None:
            self.shares.append(self.rates[-1] / limit)


def measure_modes(config: EngineConfig, workload: Workload, rounds: int, limits: LimitsPeer | None) -> list[Mode]:
    """Measure both modes in turn, and the machine's rates before them in each round."""
    modes: list[Mode] = []
    try:
        modes.append(Mode("processes", open_private(config)))
        modes.append(Mode("in_process", open_in_process(config)))
        for mode in modes:  # warm up
            token_times(mode.transport, workload.prompts("warm-up")[0], 3)
        for number in range(rounds):
            limit = None
            if limits is not None:
                limit = (workload.num_out - 1) / limits.limits.decode_seconds(workload, limits.measure())
            for mode in modes:
                mode.run(workload, number, limit)
    finally:
        for mode in modes:
            mode.close()
    return modes


def measure(setup: Setup) -> None:
    workload = setup.workload
    if workload.num_out < 3:
        raise SystemExit(f"OUT is {workload.num_out}: times between tokens need at least 3")
    config = config_from_keywords("LLM", setup.folder, setup.options)
    limits = None
    if setup.arguments.with_limits:
        limits = LimitsPeer(setup.folder, setup.dtype, setup.device, num_cpu_threads(None, 1))
        setup.stack.callback(limits.close)
    for mode in measure_modes(config, workload, setup.arguments.rounds, limits):
        setup.report.add(
            mode=mode.name,
            ttft_ms=median(mode.first_s) * 1e3,
            itl_p50_ms=percentile(mode.between_s, 50) * 1e3,
            itl_p99_ms=percentile(mode.between_s, 99) * 1e3,
            decode_tokens_per_s=median(mode.rates),
            share_of_limit=median(mode.shares) if mode.shares else None,
        )


OPTIONS = {"--with-limits": (False, "measure the machine in each round too")}
CASE = Case("latency", measure, OPTIONS, has_lengths=True, dtype="bfloat16")
