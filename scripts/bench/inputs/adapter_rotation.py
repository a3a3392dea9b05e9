"""Benchmarks of adapters that change places: loads beside answers, and many adapters over few slots."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from tokenloom.frontend.client.transport import Transport
from tokenloom.scripts.bench.cases.mixed import Load
from tokenloom.scripts.bench.inputs.adapter_requests import (
    Adapters,
    Figures,
    Run,
    interleave,
    note_shares,
    open_engine,
    run,
    warm_up,
)
from tokenloom.scripts.bench.runner import Setup

ZIPF_EXPONENT = 1.2
LOAD_PERIOD_S = 1.0
MAX_LOADS = 20  # in one run
NUM_SHORT_PROMPT = 4


def measure_loads(setup: Setup, adapters: Adapters) -> None:
    """Measure the time between tokens of answers while a new adapter is loaded each second."""
    workload, asked = setup.workload, setup.arguments
    resident = adapters.names(asked.slots - 1)  # one slot is left for the adapters that come
    fresh, num_loads = itertools.count(asked.slots), []
    options = adapters.options(asked.slots, asked.slots) | {"max_num_seqs": workload.num_requests + 2}
    transport, close = open_engine(setup, **options)

    def beside(is_new: bool) -> Run:
        def measure(number: int) -> Figures:
            numbers = itertools.islice(fresh, MAX_LOADS if is_new else 0)
            coming = [(f"n{each}", adapters.path(each)) for each in numbers]
            os.sync()  # they were written just now
            prompts = workload.prompts(f"loads {number} {is_new}")
            figures, count = run_beside(transport, prompts, resident, workload.num_out, coming)
            num_loads.extend([count] * is_new)
            for _, path in coming:
                shutil.rmtree(path)
            return figures

        return measure

    try:
        warm_up(transport, workload.prompts("warm-up"), resident)
        runs = {"all resident": beside(False), "a load each second": beside(True)}
        found = interleave(setup.report, "adapters", runs, asked.rounds)
    finally:
        close()
    calm, loaded = ([each.p99_s for each in figures] for figures in found.values())
    setup.report.note_ratios("p99 between tokens beside loads, of that without", loaded, calm)
    setup.report.note("loads by round", num_loads)


def run_beside(
    transport: Transport, prompts: list[list[int]], names: Sequence[str], num_out: int, coming: list[tuple[str, Path]]
) -> tuple[Figures, int]:
    """Run prompts as `run`, and beside them a short request each LOAD_PERIOD_S: of the next adapter of `coming`, which
    the engine does not have yet, or of a resident one if there are none. Return the prompts' figures, and the number
    of short requests."""
    load, begun, count, waiting = Load(transport), time.perf_counter(), len(prompts), iter(coming)
    for index, prompt in enumerate(prompts):
        load.submit(prompt, num_out, names[index % len(names)])
    load.run_until(lambda: all(load.times[:count]))
    next_at = time.perf_counter()

    def is_done() -> bool:
        nonlocal next_at
        is_running = any(len(times) < num_out for times in load.times[:count])
        if is_running and time.perf_counter() >= next_at and len(load.times) - count < MAX_LOADS:
            next_at += LOAD_PERIOD_S
            name, path = next(waiting) if coming else (names[0], "")
            load.submit(prompts[0][:NUM_SHORT_PROMPT], 1, name, str(path))
        return not is_running and all(load.times)

    load.run_until(is_done)
    return Figures.of(load.times[:count], begun), len(load.times) - count


def draw_zipf(count: int, size: int, seed: str) -> list[int]:
    """Draw `size` numbers below `count`, number i with a probability in proportion to (i + 1) ** -ZIPF_EXPONENT."""
    weights = [(i + 1) ** -ZIPF_EXPONENT for i in range(count)]
    return random.Random(seed).choices(range(count), weights, k=size)


def measure_zipf(setup: Setup, adapters: Adapters) -> None:
    """Measure requests of many adapters over few slots, beside as many adapters as slots."""
    asked, workload = setup.arguments, setup.workload
    transport, close = open_engine(setup, **adapters.options(asked.zipf, asked.slots))

    def of(count: int) -> Run:
        def measure(number: int) -> Figures:
            names = [f"zipf {number} {count} {batch}" for batch in range(asked.zipf_batches)]
            prompts = [prompt for name in names for prompt in workload.prompts(name)]
            drawn = [f"a{i}" for i in draw_zipf(count, len(prompts), names[0])]
            return run(transport, prompts, drawn, workload.num_out)

        return measure

    try:
        warm_up(transport, workload.prompts("warm-up"), adapters.names(asked.slots))
        runs = {f"{asked.slots} resident": of(asked.slots), f"{asked.zipf} by Zipf": of(asked.zipf)}
        found = interleave(setup.report, "adapters", runs, asked.rounds)
    finally:
        close()
    note_shares(setup.report, found, f"{asked.slots} resident")
