"""Compare servers under load, by one client: engine-launch bench served 135m --vllm ~/vllm/bin/python

`vllm bench serve` of that Python sends --num-prompts requests over HTTP at random times, --rate of them a second on
average (inf: all at once), to this engine and to vLLM, tuned, in turn within each round. At the rates of --busy-rate it
does the same once more while another process keeps a core busy. The servers start once; vLLM is stopped (SIGSTOP) while
ours is measured, and the CPU time that ours takes meanwhile is noted. The set-up of vLLM and of its client is checked
before a server starts. Prompts are IN random letters, new ones each time: IN tokens of the checkpoints of
make_checkpoint.py. The client's own random prompts (--client-prompts) are token ids that their tokenizer cannot write,
so that most of these prompts are alike and found in the prefix cache. Answers have OUT tokens. A row: time per output
token and to the first token, mean, p50 and p99; output tokens/s; the load and the cores in use before the run. Notes:
the median over the rounds of our figure relative to vLLM's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tokenloom.scripts.bench.contestant import median_ratio
from tokenloom.scripts.bench.http_server import HOST, Server, free_port
from tokenloom.scripts.bench.processes import cpu_by_process, machine_now, signal_tree, tree, used_since
from tokenloom.scripts.bench.runner import REQUIRED, Case, Setup
from tokenloom.scripts.bench.vllm_setup import check_vllm, tuned_environment
from tokenloom.scripts.bench.workload import flags_of

RUN_S = 900.0
WARM_UP_PROMPTS = 20
COLUMNS = (
    *("mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms"),
    *("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "output_throughput"),
)
COMPARED = ("mean_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "p99_ttft_ms", "output_throughput")
SPIN = "while True: pass"


def our_server(setup: Setup) -> Server:
    port = free_port()
    flags = ["--model", str(setup.folder), "--http", f"{HOST}:{port}", *flags_of(setup.options)]
    return Server("tokenloom", [sys.executable, "-m", "tokenloom.frontend.launch", *flags], port)


def vllm_server(setup: Setup) -> Server:
    python, port = setup.arguments.vllm, free_port()
    flags = ["--host", HOST, "--port", str(port), "--dtype", setup.dtype, "--max-model-len", "2048"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(setup.folder), *flags]
    return Server("vLLM tuned", command, port, tuned_environment(python) | {"VLLM_CPU_KVCACHE_SPACE": "4"})


def send_load(setup: Setup, server: Server, rate: float, name: str, num_prompts: int) -> dict[str, float]:
    """Run `vllm bench serve` against a server; return its figures. Equal names give equal prompts."""
    given, workload, draw = setup.arguments, setup.workload, random.Random(f"{server.name}, {rate}, {name}")
    with tempfile.TemporaryDirectory() as folder:
        prompts, result = Path(folder, "prompts.jsonl"), Path(folder, "result.json")
        texts = ["".join(draw.choices(string.ascii_lowercase, k=workload.num_in)) for _ in range(num_prompts)]
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        command = [given.vllm, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
        command += ["--base-url", f"http://{HOST}:{server.port}", "--model", str(setup.folder)]
        if given.client_prompts:
            command += ["--dataset-name", "random", "--seed", str(draw.randrange(1 << 31))]
            command += ["--random-input-len", str(workload.num_in), "--random-output-len", str(workload.num_out)]
        else:
            command += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"]
            command += ["--custom-output-len", str(workload.num_out), "--disable-shuffle"]
        command += ["--ignore-eos", "--num-prompts", str(num_prompts), "--request-rate", str(rate)]
        command += ["--save-result", "--result-dir", folder, "--result-filename", result.name]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=RUN_S, cwd="/")
        if done.returncode:
            raise SystemExit(f"vllm bench serve failed: {done.stderr[-3000:]}")
        figures: dict[str, float] = json.loads(result.read_text(encoding="utf-8"))
    if figures["completed"] != num_prompts:
        raise SystemExit(f"{server.name} answered {figures['completed']} of {num_prompts} requests")
    return figures


@contextlib.contextmanager
def busy_core(is_wanted: bool) -> Iterator[None]:
    """Keep a core busy by another process, which runs on any of them, if that is wanted."""
    if not is_wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", SPIN]) as spinner:
        try:
            yield
        finally:
            spinner.kill()


class Servers:
    """The two servers, of which one is measured at a time. `idle_shares`: the CPU time of ours while vLLM was measured,
    in shares of a core."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.ours, self.vllm = our_server(setup), vllm_server(setup)
        for server in (self.ours, self.vllm):
            setup.stack.callback(server.stop)
        for server in (self.ours, self.vllm):
            server.wait_ready()
        setup.stack.callback(signal_tree, self.vllm.pid, signal.SIGCONT)
        self.idle_shares: list[float] = []

    def measure(self, server: Server, rate: float, name: str, num_prompts: int) -> dict[str, float]:
        """Measure one of the servers while the other rests."""
        is_vllm = server is self.vllm
        signal_tree(self.vllm.pid, signal.SIGCONT if is_vllm else signal.SIGSTOP)
        processes, begun = tree(self.ours.pid), time.perf_counter()
        before = cpu_by_process(processes)
        figures = send_load(self._setup, server, rate, name, num_prompts)
        if is_vllm:
            used_s = sum(used_since(before, processes).values())
            self.idle_shares.append(used_s / (time.perf_counter() - begun))
        return figures


def measure(setup: Setup) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with us
    given, measured = setup.arguments, dict[tuple[float, bool, str], list[dict[str, float]]]()
    check_vllm(given.vllm, has_client=True)
    servers = Servers(setup)
    both = (servers.ours, servers.vllm)
    for server in both:
        servers.measure(server, given.rate[0], "warm-up", WARM_UP_PROMPTS)
    settings = [*((rate, False) for rate in given.rate), *((rate, True) for rate in given.busy_rate)]
    for number, (rate, is_busy), server in itertools.product(range(given.rounds), settings, both):
        state = machine_now()
        with busy_core(is_busy):
            figures = servers.measure(server, rate, f"{number}, {is_busy}", given.num_prompts)
        measured.setdefault((rate, is_busy, server.name), []).append(figures)
        row = {column: figures[column] for column in COLUMNS}
        setup.report.add(round=number + 1, rate=rate, others=int(is_busy), server=server.name, **row, **state)
    for rate, is_busy in settings:
        for column in COMPARED:
            columns = [[figures[column] for figures in measured[rate, is_busy, server.name]] for server in both]
            name = f"{column} at {rate:g}/s{', a core busy elsewhere' if is_busy else ''}, of vLLM's"
            setup.report.note(name, median_ratio(*columns))
    setup.report.note("CPU of ours while vLLM is measured, share of a core", max(servers.idle_shares))


OPTIONS = {
    "--vllm": (REQUIRED, "the Python of an environment with vLLM and pandas"),
    "--rate": ([4.0, 8.0], "requests/s"),
    "--busy-rate": ([], "requests/s at which another process keeps a core busy", float),
    "--num-prompts": (80,),
    "--client-prompts": (False, "the client's random prompts, most of them alike"),
}
CASE = Case("served", measure, OPTIONS, has_lengths=True, dtype="bfloat16")
