"""Start-up: from the command to Ready, to the first token, and to the end.

    python scripts/bench_startup.py 135m --vllm ~/vllm/bin/python

Measured with the clock of whoever types the command: `engine-launch --model …` is started, its lines are timed as they
come, a Client asks for one token as soon as Ready is printed, SIGTERM ends it. The table has one row per round; the
phases are those of the last round. Beside it: the memory of all processes after the first token (PSS, shared pages
counted once), as a share of 1.25 × the weights + 600 MB, the KV cache being untouched by then, and the CPU time that
they use while idle for --idle-s seconds. With --vllm (the Python of an environment with it) also vLLM's offline LLM,
from its command to its first token: eager, and compiling with empty caches, as on a first start. All flags of
engine-launch are taken.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tokenloom import Client, SamplingParams
from tokenloom.scripts.bench_contestant import SCRIPTS, Peer
from tokenloom.scripts.bench_processes import pss_bytes, tree
from tokenloom.scripts.bench_report import Report, add_json_argument, median
from tokenloom.scripts.bench_workload import add_model_arguments, engine_options, find_checkpoint, flags_of

STOP_TIMEOUT_S = 30.0


class Launch:
    """One `engine-launch` and the times of what it prints, in seconds since its start; `environment` adds to ours."""

    def __init__(self, flags: list[str], timeout_s: float, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "tokenloom.frontend.launch", *flags]
        self.begun = time.perf_counter()
        self._deadline = time.monotonic() + timeout_s
        environment = {**os.environ, **(environment or {})}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/", env=environment)
        self.phases: list[str] = []

    def wait_ready(self) -> str:
        """The address that the line `Ready at ADDRESS …` holds."""
        for line in self._lines():
            if line.startswith("Ready at "):
                return line.split()[2]
            self.phases.append(line)
        raise SystemExit(f"engine-launch ended with code {self._process.wait()} before it was ready")

    def _lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        fd, unread = self._process.stdout.fileno(), b""
        while True:
            if not select.select([fd], [], [], max(self._deadline - time.monotonic(), 0))[0]:
                raise SystemExit("engine-launch was not ready in time")
            data = os.read(fd, 1 << 16)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            yield from (line.decode() for line in lines)

    def processes(self) -> list[psutil.Process]:
        return tree(self._process.pid)

    def stop(self) -> float:
        """SIGTERM; seconds until the command has ended."""
        begun = time.perf_counter()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            assert self._process.stdout is not None
            self._process.stdout.close()
        return time.perf_counter() - begun


def first_token_s(address: str, begun: float) -> float:
    """Attach and ask for one token; seconds since `begun`."""
    with Client(address) as client:
        client.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - begun


def idle_cpu(processes: list[psutil.Process], seconds: float) -> float:
    """CPU seconds per second that all of them use together while nothing is asked."""

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = used()
    time.sleep(seconds)
    return (used() - before) / seconds


def measure_ours(
    number: int, num_rounds: int, idle_s: float, folder: Path, options: dict[str, object], report: Report
) -> float:
    """One start; of the last, the memory and the idleness too. Returns the seconds to the first token."""
    launch = Launch(flags_of(options), float(str(options.get("start_timeout_s", 600))))
    try:
        address = launch.wait_ready()
        ready_s = time.perf_counter() - launch.begun
        token_s = first_token_s(address, launch.begun)
        if number == num_rounds - 1:
            note_memory(pss_bytes(launch.processes()), folder, report)
            report.note("phases", launch.phases)
            report.note("idle_cpu_share_of_one_core", idle_cpu(launch.processes(), idle_s) if idle_s else None)
    finally:
        stop_s = launch.stop()
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
    """Seconds from the command to the first token; nothing that it compiled before is there."""
    command = [python, str(SCRIPTS / "peer_vllm.py"), str(folder), *(["--eager"] if is_eager else [])]
    with tempfile.TemporaryDirectory() as cache:
        caches = {"VLLM_CACHE_ROOT": f"{cache}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        begun = time.perf_counter()
        peer = Peer("vLLM", command, caches)
        try:
            peer.generate([[1, 2, 3]], 1)
            return time.perf_counter() - begun
        finally:
            peer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python of an environment with vLLM")
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long idleness is watched; 0: not at all")
    add_json_argument(parser)
    arguments = parser.parse_args()
    options = engine_options(parser, arguments)
    folder = find_checkpoint(arguments.checkpoint)
    options["model"] = str(folder)
    report = Report("start-up", {"model": arguments.checkpoint, "dtype": str(options.get("dtype", "auto"))})
    first_tokens = [
        measure_ours(number, arguments.rounds, arguments.idle_s, folder, options, report)
        for number in range(arguments.rounds)
    ]
    if arguments.vllm:
        for name, is_eager in (("vLLM, eager", True), ("vLLM, first start", False)):
            seconds = vllm_first_token_s(arguments.vllm, folder, is_eager)
            report.add(engine=name, first_token_s=seconds)
            report.note(f"{name}: relative to ours", seconds / median(first_tokens))
    report.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
