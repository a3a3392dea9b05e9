"""Measure start-up: from the command to Ready, to the first token, and to the exit.

    engine-launch bench startup 135m --vllm ~/vllm/bin/python

Measured on the operator's clock: `engine-launch --model …` is started, its lines are timed as they are printed, a
Client requests one token as soon as Ready is printed, SIGTERM ends the engine. The table has one row per round; the
phases are those of the last round. Also noted: the memory of all processes after the first token (PSS, shared pages
counted once), as a share of 1.25 × the weights + 600 MB (the KV cache is untouched by then), and the CPU time that
they use while idle for --idle-s seconds. With --vllm (the Python of an environment with it) also vLLM's offline LLM,
from its command to its first token: eager, and compiling with empty caches, as on a first start. All flags of
engine-launch are taken.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil

from tokenloom import Client, SamplingParams
from tokenloom.scripts.bench.contestant import PEERS, Peer
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.processes import pss_bytes
from tokenloom.scripts.bench.report import Report, median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import flags_of


def first_token_s(address: str, begun: float) -> float:
    """Connect, request one token and return the seconds since `begun`."""
    with Client(address) as client:
        client.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - begun


def idle_cpu(processes: list[psutil.Process], seconds: float) -> float:
    """Wait for `seconds`; return the CPU seconds per second that all processes together used meanwhile."""

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = used()
    time.sleep(seconds)
    return (used() - before) / seconds


def measure_ours(number: int, setup: Setup) -> float:
    """Measure one start, add a row, return the seconds to the first token; the last round notes memory and idle CPU."""
    flags, start_timeout_s = flags_of(setup.options), float(str(setup.options.get("start_timeout_s", 600)))
    report, idle_s = setup.report, setup.arguments.idle_s
    with tempfile.TemporaryDirectory() as runtime:
        begun = time.perf_counter()
        with Engine(Path(runtime), flags, has_faults=False) as engine:
            address = engine.wait_ready(start_timeout_s)
            ready_s = time.perf_counter() - begun
            token_s = first_token_s(address, begun)
            if number == setup.arguments.rounds - 1:
                note_memory(pss_bytes(engine.processes()), setup.folder, report)
                report.note("phases", [line for line in engine.lines if not line.startswith("Ready")])
                report.note("idle_cpu_share_of_one_core", idle_cpu(engine.processes(), idle_s) if idle_s else None)
            stopping = time.perf_counter()
            engine.stop()
            stop_s = time.perf_counter() - stopping
    report.add(round=number + 1, engine="tokenloom", ready_s=ready_s, first_token_s=token_s, stop_s=stop_s)
    return token_s


def note_memory(memory: dict[str, int], folder: Path, report: Report) -> None:
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    limit = 1.25 * weights + 600e6
    report.note("pss_mib", {name: round(size / 2**20, 1) for name, size in memory.items()})
    report.note("pss_mib_in_all", sum(memory.values()) / 2**20)
    report.note("weights_mib", weights / 2**20)
    report.note("pss relative to 1.25 weights + 600 MB", sum(memory.values()) / limit)


def vllm_first_token_s(python: str, folder: Path, is_eager: bool) -> float:
    """Start vLLM with empty compile caches; return the seconds from the command to the first token."""
    command = [python, str(PEERS / "vllm_peer.py"), str(folder), *(["--eager"] if is_eager else [])]
    with tempfile.TemporaryDirectory() as cache:
        caches = {"VLLM_CACHE_ROOT": f"{cache}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        begun = time.perf_counter()
        peer = Peer("vLLM", command, caches)
        try:
            peer.generate([[1, 2, 3]], 1)
            return time.perf_counter() - begun
        finally:
            peer.close()


def measure(setup: Setup) -> None:
    setup.options["model"] = str(setup.folder)
    arguments, report = setup.arguments, setup.report
    first_tokens = [measure_ours(number, setup) for number in range(arguments.rounds)]
    if arguments.vllm:
        for name, is_eager in (("vLLM, eager", True), ("vLLM, first start", False)):
            seconds = vllm_first_token_s(arguments.vllm, setup.folder, is_eager)
            report.add(engine=name, first_token_s=seconds)
            report.note(f"{name}: relative to ours", seconds / median(first_tokens))


OPTIONS = {
    "--vllm": (None, "the Python of an environment with vLLM"),
    "--idle-s": (10.0, "how long to measure idle CPU; 0: not at all"),
}
CASE = Case("start-up", measure, OPTIONS)
