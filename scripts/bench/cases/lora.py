"""Measure LoRA adapters beside the base model, in turn within one run.

    engine-launch bench lora 0.6b 32 128 64 --adapters 1,8,32 --rounds 10

One engine stays open. Per round it runs N requests of IN new random prompt tokens and OUT answer tokens with the base
model, and again for each number of adapters, which the requests take in turn; the order of these runs rotates from
round to round. Adapters are random, of rank --rank, for all linear layers. Printed: tokens per second in all, and while
all requests decode; the median over the rounds of each one's share of the base model, and the interval of that median
(95 %). All flags of engine-launch are taken. Further measurements, each with engines of its own:

    --with-peft   the same requests of --peft adapters with peft: one adapter after the other, and all in one batch
    --loads       time between tokens of N answers while a new adapter is loaded each second, beside a resident one
    --zipf 1000   requests of that many adapters, drawn by Zipf's law (exponent 1.2), over --slots slots; beside as many
                  adapters as slots, which stay resident
    --unused      an engine that may serve adapters and has none, beside an engine that may not
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from tokenloom.scripts.bench.contestant import PEERS, Peer
from tokenloom.scripts.bench.inputs.adapter_requests import (
    Adapters,
    Figures,
    Run,
    interleave,
    linked_cache,
    note_shares,
    open_engine,
    run,
    warm_up,
)
from tokenloom.scripts.bench.inputs.adapter_rotation import measure_loads, measure_zipf
from tokenloom.scripts.bench.processes import cpu_by_process, is_worker, tree, used_since
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.workers.machine.cpu_threads import num_cpu_threads


def measure_batches(setup: Setup, adapters: Adapters) -> None:
    """Measure requests that take several numbers of adapters beside the base model and, if asked, peft."""
    workload, asked = setup.workload, setup.arguments
    most = max(*asked.adapters, asked.peft if asked.with_peft else 0)

    def with_adapters(count: int) -> Run:
        names = adapters.names(count)
        return lambda number: run(transport, workload.prompts(f"{number} {count}"), names, workload.num_out)

    with contextlib.ExitStack() as stack:
        transport, close = open_engine(setup, **adapters.options(most, most))
        stack.callback(close)
        warm_up(transport, workload.prompts("warm-up"), adapters.names(most))
        runs = {"base": with_adapters(0)} | {label(count): with_adapters(count) for count in asked.adapters}
        note_shares(setup.report, interleave(setup.report, "adapters", runs, asked.rounds), "base")
        if asked.with_peft:
            measure_peft(setup, adapters, with_adapters(asked.peft), stack)


def label(count: int) -> str:
    return f"{count} adapter{'s' if count > 1 else ''}"


def measure_peft(setup: Setup, adapters: Adapters, ours: Run, stack: contextlib.ExitStack) -> None:
    """Measure peft in a process of its own beside our engine, with the same checkpoint and adapters."""
    asked, workload = setup.arguments, setup.workload
    threads = num_cpu_threads(asked.num_threads if "num_threads" in setup.options else None, 1)
    flags = ["--dtype", setup.dtype, "--device", setup.device, "--threads", str(threads)]
    folders = ",".join(str(adapters.path(number)) for number in range(asked.peft))
    command = [sys.executable, str(PEERS / "peft_peer.py"), str(setup.folder), *flags, "--adapters", folders]
    peer = Peer("peft", command)
    stack.callback(peer.close)

    def theirs(is_mixed: bool) -> Run:
        def generate(number: int) -> Figures:
            prompts = workload.prompts(f"{number} peft {is_mixed}")
            answer = peer.ask({"prompts": prompts, "max_tokens": workload.num_out, "is_mixed": is_mixed})
            rate = answer["num_tokens"] / answer["seconds"]
            return Figures(answer["seconds"], rate, float("nan"), float("nan"))

        return generate

    mine = f"{label(asked.peft)}, beside peft"
    runs = {mine: ours, "peft, one after the other": theirs(False), "peft, one batch": theirs(True)}
    found = interleave(setup.report, "adapters", runs, asked.rounds)
    rates = {name: [each.tokens_per_s for each in figures] for name, figures in found.items()}
    for name in list(runs)[1:]:
        setup.report.note_ratios(f"tokens_per_s with {label(asked.peft)}, of {name}", rates[mine], rates[name])


def measure_unused(setup: Setup, adapters: Adapters) -> None:
    """Measure an engine that may serve adapters and gets requests of the base model alone, beside one that may not."""
    workload, asked = setup.workload, setup.arguments
    runs: dict[str, Run] = {}
    cpu_s: dict[str, list[float]] = {}

    def add(name: str, stack: contextlib.ExitStack, **options: object) -> None:
        older = {process.pid for process in tree(os.getpid())}
        transport, close = open_engine(setup, **options)
        stack.callback(close)
        processes = [process for process in tree(os.getpid()) if process.pid not in older]
        warm_up(transport, workload.prompts("warm-up"), [])

        def measure(number: int) -> Figures:
            before = cpu_by_process(processes)
            figures = run(transport, workload.prompts(f"unused {number}"), [], workload.num_out)
            used = used_since(before, processes)
            cpu_s.setdefault(name, []).append(sum(spent for title, spent in used.items() if is_worker(title)))
            return figures

        runs[name] = measure

    with contextlib.ExitStack() as stack:
        add("not enabled", stack)
        add("enabled, unused", stack, **adapters.options(0, asked.slots))
        found = interleave(setup.report, "adapters", runs, asked.rounds)
    note_shares(setup.report, found, "not enabled")
    totals = {name: sum(spent) for name, spent in cpu_s.items()}  # of all rounds: the clock ticks every 10 ms
    setup.report.note("workers' CPU seconds", totals)


def counts(text: str) -> list[int]:
    """Parse numbers of adapters, such as 1,8,32."""
    found = [int(each) for each in text.split(",") if each]
    if found and min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text} has a number below 1")
    return found


def measure(setup: Setup) -> None:
    asked = setup.arguments
    folder = setup.stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-lora-"))
    os.environ["XDG_CACHE_HOME"] = str(linked_cache(Path(folder, "cache")))
    adapters = Adapters(Path(folder, "adapters"), setup.folder, asked.rank)
    if asked.adapters:
        measure_batches(setup, adapters)
    if asked.unused:
        measure_unused(setup, adapters)
    if asked.loads:
        measure_loads(setup, adapters)
    if asked.zipf:
        measure_zipf(setup, adapters)


OPTIONS = {
    "--adapters": ((1, 8, 32), "numbers of adapters in a batch; none, an empty text, measures the other parts", counts),
    "--rank": (16, "of the adapters"),
    "--with-peft": (False, "compare with peft"),
    "--peft": (8, "adapters in the comparison with peft"),
    "--loads": (False, "load an adapter each second beside answers"),
    "--zipf": (0, "adapters that take turns in the slots"),
    "--zipf-batches": (8, "of N requests, submitted at once"),
    "--unused": (False, "compare an engine without adapters"),
    "--slots": (8, "of --loads, --zipf and --unused"),
}
CASE = Case("lora", measure, OPTIONS, num_requests=32, dtype="bfloat16")
