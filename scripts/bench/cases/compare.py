"""Compare this engine with the engines a user would run instead, in turn within one run, and with the machine's limit.

    engine-launch bench compare 135m 32 128 64 --vllm ~/vllm/bin/python --llama-bin ~/llama.cpp/build/bin

Each round: the limits (limits.py), then every contestant with N requests of IN random prompt tokens and OUT
answer tokens, then the same with one answer token; all greedy, ignore_eos, new prompts each time. Measured per
contestant: seconds, output tokens/s, and decode tokens/s = N (OUT - 1) / (seconds - seconds with one token). Printed:
medians, the median over the rounds of our throughput relative to theirs (x_ours), and each one's share of the limit.

Contestants: ours in its processes; transformers' generate of this Python (--no-transformers: without); with --vllm the
vLLM of another Python, as it comes and tuned (all cores, tcmalloc and Intel's OpenMP preloaded); llama.cpp on MODEL if
that is a GGUF file, else on one that write_gguf.py makes, in Q8_0 or Q4_0 if --quantization is int8 or int4: with
--llama-bin FOLDER, its own programs, all requests in one batch by llama-batched-bench, with --llama-cpp PYTHON its
Python API, one request after the other. Their set-up is checked before anything starts. --cpu adds the CPU time per
process. The rates of each round stand beside the load and the cores in use just before it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tokenloom import LLM
from tokenloom.ipc.processor import cpu_flags
from tokenloom.ipc.spec.config.gguf_index import GGUF_INDEX_NAME
from tokenloom.scripts.bench.contestant import PEERS, Contestant, Ours, Peer, median_ratio, transformers_peer
from tokenloom.scripts.bench.limits import LimitsPeer
from tokenloom.scripts.bench.llama_cpp import UNUSED, LlamaBatch, LlamaCpp
from tokenloom.scripts.bench.processes import cpu_by_process, machine_now, title, tree, used_since
from tokenloom.scripts.bench.report import Json, Report, median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.vllm_setup import check_vllm, tuned_environment
from tokenloom.scripts.bench.workload import Workload
from tokenloom.workers.machine.cpu_threads import num_cpu_threads

CONVERT_TIMEOUT_S = 900
DEFAULT_BUDGET = 2048
GGUF_FORMS = {"int8": "Q8_0", "int4": "Q4_0"}  # by --quantization


@dataclass
class Result:
    """The measurements of one contestant, one entry per round."""

    contestant: Contestant
    seconds: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)  # without prefill; empty for OUT = 1
    shares: list[float] = field(default_factory=list)  # of the machine's limit
    cpu_s: dict[str, float] = field(default_factory=dict)  # of the last round's long run, by process

    def run(self, workload: Workload, number: int, limit_s: float, watch_cpu: bool) -> None:
        processes = processes_of(self.contestant) if watch_cpu else []
        before = cpu_by_process(processes)
        self.seconds.append(self.contestant.generate(workload.prompts(number), workload.num_out))
        if watch_cpu:
            self.cpu_s = used_since(before, processes)
        self.shares.append(limit_s / self.seconds[-1])
        if workload.num_out > 1:
            prefill_s = self.contestant.generate(workload.prompts(f"{number}, one token"), 1)
            self.decode_s.append(self.seconds[-1] - prefill_s)


def processes_of(contestant: Contestant) -> list[psutil.Process]:
    """Return a contestant's processes; for our engine, every tokenloom child of this process; none of a program that
    ends with each measurement."""
    if isinstance(contestant, Peer):
        return tree(contestant.pid)
    if isinstance(contestant, LlamaBatch):
        return []
    return [each for each in psutil.Process().children(recursive=True) if title(each).startswith("tokenloom")]


def check_peers(arguments: argparse.Namespace, threads: int) -> None:
    """SystemExit with the mend if a requested peer cannot be measured."""
    if arguments.vllm:
        check_vllm(arguments.vllm)
        tuned_environment(arguments.vllm)
    if arguments.llama_bin:
        print(LlamaCpp(arguments.llama_bin, threads).check(cpu_flags(), arguments.llama_unused), file=sys.stderr)


def openers(setup: Setup) -> Iterator[Callable[[], Contestant]]:
    """Yield for each requested contestant a function that starts it, ours first."""
    arguments, folder, dtype, threads = setup.arguments, setup.folder, setup.dtype, num_cpu_threads(None, 1)
    yield lambda: Ours(LLM(folder, **setup.options))
    if arguments.transformers:
        yield lambda: transformers_peer(folder, dtype, setup.device, threads)
    if arguments.vllm:
        command = [arguments.vllm, str(PEERS / "vllm_peer.py"), str(folder), "--dtype", dtype]
        if arguments.untuned:
            yield lambda: Peer("vLLM as it comes", command)
        yield lambda: Peer("vLLM tuned", command, tuned_environment(arguments.vllm))
    form = GGUF_FORMS.get(getattr(arguments, "quantization", "none"), "BF16")
    if arguments.llama_bin:
        programs = LlamaCpp(arguments.llama_bin, threads)
        yield lambda: LlamaBatch(programs, gguf_file(arguments.llama_cpp or sys.executable, folder, form))
    if arguments.llama_cpp:
        yield lambda: llama_cpp_peer(arguments.llama_cpp, folder, threads, form=form)


def gguf_file(python: str, folder: Path, form: str) -> Path:
    """Return the GGUF file of a model; one that is made by `python`, which needs gguf, if it is no such file itself."""
    if (folder / GGUF_INDEX_NAME).exists():
        return next(iter(sorted(folder.glob("*.gguf"))))
    file = folder / ("model.gguf" if form == "BF16" else f"model-{form}.gguf")
    if not file.exists():
        convert = [python, str(PEERS.parent / "inputs/write_gguf.py"), str(folder), str(file), form]
        subprocess.run(convert, check=True, timeout=CONVERT_TIMEOUT_S, stdout=sys.stderr)
    return file


def llama_cpp_peer(
    python: str, folder: Path, threads: int, *more: str, name: str = "llama.cpp, its Python API", form: str = "BF16"
) -> Peer:
    arguments = [str(gguf_file(python, folder, form)), "--threads", str(threads), *more]
    return Peer(name, [python, str(PEERS / "llama_cpp_peer.py"), *arguments])


def compare(results: list[Result], workload: Workload, limits: LimitsPeer, arguments: argparse.Namespace) -> list[Json]:
    """Warm up and measure all contestants, in turn each round, into `results`; return the machine's rates by round."""
    for result in results:
        result.contestant.generate(workload.prompts("warm-up"), min(2, workload.num_out))
    rates_by_round: list[Json] = []
    budget = getattr(arguments, "max_num_batched_tokens", DEFAULT_BUDGET)
    for round_number in range(arguments.rounds):
        state = machine_now()
        rates = limits.measure()
        limit_s = limits.limits.seconds(workload, rates, budget)
        rates_by_round.append(
            {
                **state,
                "read_GB_per_s": rates.read_bytes_per_s / 1e9,
                "matmul_GFLOP_per_s": rates.flops_per_s / 1e9,
                "limit_out_tokens_per_s": workload.num_requests * workload.num_out / limit_s,
            }
        )
        for result in results:
            result.run(workload, round_number, limit_s, arguments.cpu)
    return rates_by_round


def add_rows(report: Report, results: list[Result], workload: Workload) -> None:
    ours = results[0]
    num_tokens = workload.num_requests * workload.num_out
    for result in results:
        has_decode = bool(result.decode_s)
        report.add(
            engine=result.contestant.name,
            seconds=median(result.seconds),
            out_tokens_per_s=num_tokens / median(result.seconds),
            decode_tokens_per_s=(num_tokens - workload.num_requests) / median(result.decode_s) if has_decode else None,
            x_ours=median_ratio(result.seconds, ours.seconds),
            x_ours_decode=median_ratio(result.decode_s, ours.decode_s) if has_decode else None,
            share_of_limit=median(result.shares),
        )
        if result.cpu_s:
            report.note(f"CPU seconds of {result.contestant.name}", result.cpu_s)


def measure(setup: Setup) -> None:
    check_peers(setup.arguments, num_cpu_threads(None, 1))
    limits = LimitsPeer(setup.folder, setup.dtype, setup.device, num_cpu_threads(None, 1))
    setup.stack.callback(limits.close)
    results: list[Result] = []
    for open_contestant in openers(setup):
        contestant = open_contestant()
        setup.stack.callback(contestant.close)
        results.append(Result(contestant))
    rates_by_round = compare(results, setup.workload, limits, setup.arguments)
    add_rows(setup.report, results, setup.workload)
    setup.report.note("machine by round", rates_by_round)


OPTIONS = {
    "--transformers": (True,),
    "--vllm": (None, "the Python of an environment with vLLM"),
    "--untuned": (True, "vLLM as it comes, too: it compiles long"),
    "--llama-bin": (None, "the folder of llama.cpp's programs, built with its libraries", Path),
    **UNUSED,
    "--llama-cpp": (None, "the Python of an environment with llama-cpp-python, gguf and safetensors"),
    "--cpu": (False, "also print the CPU seconds of every process"),
}
CASE = Case("compare", measure, OPTIONS, num_requests=32, dtype="bfloat16")
