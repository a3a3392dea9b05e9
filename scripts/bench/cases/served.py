"""Compare servers under load, by one client: engine-launch bench served 135m --vllm ~/vllm/bin/python

`vllm bench serve` of that Python sends --num-prompts requests over HTTP at random times, --rate of them a second on
average, to this engine and to vLLM, tuned as in cases/compare.py, in turn within each round. vLLM is stopped (SIGSTOP)
while ours is measured. Prompts are IN random letters, new ones each time: IN tokens of the checkpoints of
make_checkpoint.py. The client's own random prompts (--client-prompts) are token ids that their tokenizer cannot write,
so that most of these prompts are alike and found in the prefix cache. Answers have OUT tokens.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import string
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenloom.scripts.bench.contestant import median_ratio
from tokenloom.scripts.bench.http_server import HOST, Server, free_port
from tokenloom.scripts.bench.processes import signal_tree
from tokenloom.scripts.bench.runner import REQUIRED, Case, Setup
from tokenloom.scripts.bench.vllm_setup import check_vllm, tuned_environment
from tokenloom.scripts.bench.workload import flags_of

RUN_S = 900.0
WARM_UP_PROMPTS = 20
COLUMNS = ("mean_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "p99_ttft_ms", "output_throughput")


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


def measure(setup: Setup) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with us
    given, measured = setup.arguments, dict[tuple[float, str], list[dict[str, float]]]()
    check_vllm(given.vllm, has_client=True)
    ours, vllm = our_server(setup), vllm_server(setup)
    for server in (ours, vllm):
        setup.stack.callback(server.stop)
    for server in (ours, vllm):
        server.wait_ready()
    setup.stack.callback(signal_tree, vllm.pid, signal.SIGCONT)

    def load(server: Server, rate: float, name: str, num_prompts: int) -> dict[str, float]:
        signal_tree(vllm.pid, signal.SIGCONT if server is vllm else signal.SIGSTOP)
        return send_load(setup, server, rate, name, num_prompts)

    for server in (ours, vllm):
        load(server, given.rate[0], "warm-up", WARM_UP_PROMPTS)
    for number, rate, server in itertools.product(range(given.rounds), given.rate, (ours, vllm)):
        figures = load(server, rate, str(number), given.num_prompts)
        measured.setdefault((rate, server.name), []).append(figures)
        row = {column: figures[column] for column in COLUMNS}
        setup.report.add(round=number + 1, rate=rate, server=server.name, **row)
    for rate in given.rate:
        for column in ("mean_tpot_ms", "p99_ttft_ms"):
            columns = [[figures[column] for figures in measured[rate, server.name]] for server in (ours, vllm)]
            setup.report.note(f"{column} at {rate:g}/s, of vLLM's", median_ratio(*columns))


OPTIONS = {
    "--vllm": (REQUIRED, "the Python of an environment with vLLM and pandas"),
    "--rate": ([4.0, 8.0], "requests/s"),
    "--num-prompts": (80,),
    "--client-prompts": (False, "the client's random prompts, most of them alike"),
}
CASE = Case("served", measure, OPTIONS, has_lengths=True, dtype="bfloat16")
