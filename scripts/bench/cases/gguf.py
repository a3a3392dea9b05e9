"""Compare with llama.cpp on a GGUF file, each as its users run it, in turn within each round.

    engine-launch bench gguf FILE.gguf 128 64 --llama-bin ~/llama.cpp/build/bin

The works: `prompt of N`, one prompt of each length in --prompt, its tokens/s until the first token of the answer
(llama-bench -p N); `decode`, the OUT - 1 tokens of an answer behind the first, tokens/s (llama-bench -n at a depth of
IN); `N at once`, for each count in --batch, that many prompts of IN tokens with OUT answer tokens each, the output
tokens/s of the whole (llama-batched-bench, all in one batch). llama.cpp's programs sample no tokens. With --llama-cpp
PYTHON its Python API does the same works, requests one after the other. The set-up of llama.cpp is checked before
anything starts, and its system line noted. A row stands beside the load and the cores in use before it; the machine's
rates of each round are noted. Notes: the median over the rounds of our rate relative to llama.cpp's, and its interval.
Memory and start are those of `bench startup`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from tokenloom.frontend.client.transport import Transport
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.frontend.llm import open_private
from tokenloom.ipc.processor import cpu_flags
from tokenloom.scripts.bench.cases.compare import gguf_file, llama_cpp_peer
from tokenloom.scripts.bench.cases.mixed import Load
from tokenloom.scripts.bench.contestant import Peer
from tokenloom.scripts.bench.limits import LimitsPeer
from tokenloom.scripts.bench.llama_cpp import UNUSED, LlamaCpp
from tokenloom.scripts.bench.processes import machine_now
from tokenloom.scripts.bench.report import Json
from tokenloom.scripts.bench.runner import REQUIRED, Case, Setup
from tokenloom.scripts.bench.workload import Workload
from tokenloom.workers.machine.cpu_threads import num_cpu_threads

OURS, THEIRS, PYTHON_API = "tokenloom", "llama.cpp", "llama.cpp, its Python API"


class Reader(Protocol):
    """A contestant that computes a GGUF file. Rates are in tokens/s; equal names give equal prompts."""

    def prompt_rate(self, length: int, name: str) -> float:
        """Measure a prompt until the first token of its answer."""
        ...

    def decode_rate(self, num_in: int, num_out: int, name: str) -> float:
        """Measure the tokens of an answer behind the first."""
        ...

    def batch_rate(self, num_requests: int, num_in: int, num_out: int, name: str) -> float:
        """Measure requests that are submitted at once, in output tokens."""
        ...


class Engine:
    """This engine behind its transport; the times are those of the tokens' arrival there."""

    def __init__(self, transport: Transport, vocab_size: int) -> None:
        self._transport, self._vocab_size = transport, vocab_size

    def prompt_rate(self, length: int, name: str) -> float:
        return length / self._times(1, length, 1, name)[0][0]

    def decode_rate(self, num_in: int, num_out: int, name: str) -> float:
        (times,) = self._times(1, num_in, num_out, name)
        return (num_out - 1) / (times[-1] - times[0])

    def batch_rate(self, num_requests: int, num_in: int, num_out: int, name: str) -> float:
        times = self._times(num_requests, num_in, num_out, name)
        return num_requests * num_out / max(each[-1] for each in times)

    def _times(self, num_requests: int, num_in: int, num_out: int, name: str) -> list[list[float]]:
        """Submit requests at once; return the seconds until each token of each."""
        prompts = Workload(num_requests, num_in, num_out, self._vocab_size).prompts(name)
        load, begun = Load(self._transport), time.perf_counter()
        for prompt in prompts:
            load.submit(prompt, num_out)
        load.run_until(lambda: all(len(times) >= num_out for times in load.times))
        return [[when - begun for when in times] for times in load.times]


class Programs:
    """llama.cpp's own programs, which draw their prompts themselves."""

    def __init__(self, programs: LlamaCpp, file: Path) -> None:
        self._programs, self._file = programs, file

    def prompt_rate(self, length: int, name: str) -> float:
        return self._programs.prompt_rate(self._file, length)

    def decode_rate(self, num_in: int, num_out: int, name: str) -> float:
        return self._programs.decode_rate(self._file, num_in, num_out - 1)

    def batch_rate(self, num_requests: int, num_in: int, num_out: int, name: str) -> float:
        return num_requests * num_out / self._programs.batch_seconds(self._file, num_requests, num_in, num_out)


class PythonApi:
    """llama.cpp's Python API, which answers one request after the other."""

    def __init__(self, peer: Peer, vocab_size: int) -> None:
        self._peer, self._vocab_size = peer, vocab_size

    def prompt_rate(self, length: int, name: str) -> float:
        return length / self._seconds(1, length, 1, name)

    def decode_rate(self, num_in: int, num_out: int, name: str) -> float:
        whole, first = (self._seconds(1, num_in, count, f"{name}, {count}") for count in (num_out, 1))
        return (num_out - 1) / (whole - first)

    def batch_rate(self, num_requests: int, num_in: int, num_out: int, name: str) -> float:
        return num_requests * num_out / self._seconds(num_requests, num_in, num_out, name)

    def _seconds(self, num_requests: int, num_in: int, num_out: int, name: str) -> float:
        return self._peer.generate(Workload(num_requests, num_in, num_out, self._vocab_size).prompts(name), num_out)


def works(
    prompts: list[int], batches: list[int], num_in: int, num_out: int
) -> dict[str, Callable[[Reader, str], float]]:
    """Return by name how a contestant's rate at each work is measured."""

    def prompt_of(length: int) -> Callable[[Reader, str], float]:
        return lambda reader, name: reader.prompt_rate(length, name)

    def batch_of(count: int) -> Callable[[Reader, str], float]:
        return lambda reader, name: reader.batch_rate(count, num_in, num_out, name)

    found = {f"prompt of {length}": prompt_of(length) for length in prompts}
    found["decode"] = lambda reader, name: reader.decode_rate(num_in, num_out, name)
    return found | {f"{count} at once": batch_of(count) for count in batches}


def readers(setup: Setup, programs: LlamaCpp, file: Path) -> Iterator[tuple[str, Reader]]:
    """Start the contestants, ours first; yield the name and contestant of each. They end with the setup's stack."""
    arguments, workload = setup.arguments, setup.workload
    transport, close = open_private(config_from_keywords("LLM", setup.folder, setup.options))
    setup.stack.callback(close)
    yield OURS, Engine(transport, workload.vocab_size)
    yield THEIRS, Programs(programs, file)
    if arguments.llama_cpp:
        longest = max(*arguments.prompt, workload.num_in) + workload.num_out
        context = ("--max-model-len", str(longest))
        peer = llama_cpp_peer(arguments.llama_cpp, setup.folder, programs.threads, *context)
        setup.stack.callback(peer.close)
        yield PYTHON_API, PythonApi(peer, workload.vocab_size)


def measure(setup: Setup) -> None:
    given, workload, report = setup.arguments, setup.workload, setup.report
    programs = LlamaCpp(given.llama_bin, num_cpu_threads(None, 1))
    report.note("llama.cpp's system line", programs.check(cpu_flags(), given.llama_unused))
    file = gguf_file(given.llama_cpp or sys.executable, setup.folder, "BF16")
    report.note("file, GB", file.stat().st_size / 1e9)
    limits = LimitsPeer(setup.folder, "bfloat16", "cpu", programs.threads)
    setup.stack.callback(limits.close)
    contestants = dict(readers(setup, programs, file))
    measured: dict[tuple[str, str], list[float]] = {}
    rates_by_round: list[Json] = []
    for name, reader in contestants.items():
        if name != THEIRS:  # whose programs warm up in each of their runs
            reader.batch_rate(2, workload.num_in, 4, "warm-up")
    for number in range(given.rounds):
        rates = limits.measure()
        gigabytes, gigaflops = rates.read_bytes_per_s / 1e9, rates.flops_per_s / 1e9
        rates_by_round.append({"read_GB_per_s": gigabytes, "matmul_GFLOP_per_s": gigaflops})
        for work, rate_of in works(given.prompt, given.batch, workload.num_in, workload.num_out).items():
            state, row = machine_now(), {}
            for name, reader in contestants.items():
                row[name] = rate_of(reader, f"{work}, {number}")
                measured.setdefault((work, name), []).append(row[name])
            report.add(round=number + 1, work=work, **row, x_llama_cpp=row[OURS] / row[THEIRS], **state)
    for (work, name), values in measured.items():
        if name == OURS:
            report.note_ratios(f"{work}, of llama.cpp's rate", values, measured[work, THEIRS])
    report.note("machine by round", rates_by_round)


OPTIONS = {
    "--llama-bin": (REQUIRED, "the folder of llama.cpp's programs, built with its libraries", Path),
    **UNUSED,
    "--llama-cpp": (None, "the Python of an environment with llama-cpp-python"),
    "--prompt": ([512, 2048], "lengths of prompts"),
    "--batch": ([8, 32], "numbers of requests"),
}
CASE = Case("GGUF file beside llama.cpp", measure, OPTIONS, has_lengths=True, rounds=4)
