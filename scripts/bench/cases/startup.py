"""Measure start-up: from the command to Ready, to the first token, and to the exit.

    engine-launch bench startup 135m --vllm ~/vllm/bin/python
    engine-launch bench startup FILE.gguf --llama-bin ~/llama.cpp/build/bin --max-model-len 4096

Measured on the operator's clock: `engine-launch --model …` is started, its lines are timed as they are printed, a
Client requests one token as soon as Ready is printed, SIGTERM ends the engine. The table has one row per engine and
round, with the memory of all its processes after the first token (PSS, shared pages counted once), their CPU time until
then, and the load and the cores in use before the start; the phases are those of the last round. Also noted: the memory
as a share of 1.25 × the weights + 600 MB (the KV cache is untouched by then), and the CPU time that the processes use
while idle for --idle-s seconds. With --llama-bin (the folder of llama.cpp's programs) also llama-server with the same
GGUF file, in turn with ours, which serves HTTP then as well: from its command until /health answers, and to the first
token of /completion; --max-model-len is its context, too. The page cache holds the weights before each start. With
--vllm (the Python of an environment with it) also vLLM's offline LLM, from its command to its first token: eager, and
compiling with empty caches, as on a first start. All flags of engine-launch are taken.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import tempfile
import time
from http import HTTPStatus
from pathlib import Path

import psutil

from tokenloom import Client, SamplingParams
from tokenloom.frontend.checkpoint.gguf.folder import SUFFIX
from tokenloom.ipc.processor import cpu_flags
from tokenloom.ipc.spec.config.weight_files import weight_paths
from tokenloom.scripts.bench.cases.compare import gguf_file
from tokenloom.scripts.bench.contestant import ANSWER_TIMEOUT_S, PEERS, Peer
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.http_server import HOST, free_port
from tokenloom.scripts.bench.llama_cpp import UNUSED, LlamaCpp
from tokenloom.scripts.bench.processes import cpu_by_process, machine_now, pss_bytes, tree
from tokenloom.scripts.bench.report import Report, median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.vllm_setup import check_vllm
from tokenloom.scripts.bench.workload import flags_of
from tokenloom.workers.machine.cpu_threads import num_cpu_threads

PIECE_BYTES = 8 << 20


def fill_page_cache(folder: Path) -> None:
    """Read the weights: an engine may have dropped them from the page cache."""
    for path in weight_paths(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(PIECE_BYTES):
                pass


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


def measure_ours(setup: Setup, number: int, is_last: bool) -> float:
    """Measure one start and add its row; return the seconds to the first token. The last one notes phases and more."""
    flags, start_timeout_s = flags_of(setup.options), float(str(setup.options.get("start_timeout_s", 600)))
    report, idle_s = setup.report, setup.arguments.idle_s
    fill_page_cache(setup.folder)
    state = machine_now()
    with tempfile.TemporaryDirectory() as runtime:
        begun = time.perf_counter()
        with Engine(Path(runtime), flags, has_faults=False) as engine:
            address = engine.wait_ready(start_timeout_s)
            ready_s = time.perf_counter() - begun
            token_s = first_token_s(address, begun)
            memory = pss_bytes(engine.processes())
            state["cpu_s"] = sum(cpu_by_process(engine.processes()).values())
            if is_last:
                note_memory(memory, setup.folder, report)
                report.note("phases", [line for line in engine.lines if not line.startswith("Ready")])
                report.note("idle_cpu_share_of_one_core", idle_cpu(engine.processes(), idle_s) if idle_s else None)
            stopping = time.perf_counter()
            engine.stop()
            stop_s = time.perf_counter() - stopping
    add_row(report, number, "tokenloom", ready_s, token_s, memory, stop_s=stop_s, **state)
    return token_s


def measure_llama_server(setup: Setup, number: int, programs: LlamaCpp, file: Path) -> float:
    """Measure one start of llama-server and add its row; return the seconds to the first token."""
    context = setup.options.get("max_model_len")
    fill_page_cache(setup.folder)
    state = machine_now()
    begun = time.perf_counter()
    server = programs.server(file, None if context is None else int(str(context)))
    try:
        server.wait_ready()
        ready_s = time.perf_counter() - begun
        request_token(server.port)
        token_s = time.perf_counter() - begun
        memory = pss_bytes(tree(server.pid))
        state["cpu_s"] = sum(cpu_by_process(tree(server.pid)).values())
    finally:
        stopping = time.perf_counter()
        server.stop()
    stop_s = time.perf_counter() - stopping
    add_row(setup.report, number, server.name, ready_s, token_s, memory, stop_s=stop_s, **state)
    return token_s


def add_row(
    report: Report, number: int, engine: str, ready_s: float, token_s: float, memory: dict[str, int], **more: float
) -> None:
    mebibytes = sum(memory.values()) / 2**20
    report.add(round=number, engine=engine, ready_s=ready_s, first_token_s=token_s, pss_mib=mebibytes, **more)


def request_token(port: int) -> None:
    """Request one token of llama-server."""
    body = json.dumps({"prompt": [1, 2, 3], "n_predict": 1, "temperature": 0, "ignore_eos": True})
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    finally:
        connection.close()
    if answer.status != HTTPStatus.OK or json.loads(text).get("tokens_predicted") != 1:
        raise SystemExit(f"llama-server answered {answer.status}: {text[:1000]}")


def note_memory(memory: dict[str, int], folder: Path, report: Report) -> None:
    weights = sum(file.stat().st_size for form in ("*.safetensors", "*.gguf") for file in folder.glob(form))
    limit = 1.25 * weights + 600e6
    report.note("pss_mib", {name: round(size / 2**20, 1) for name, size in memory.items()})
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
    arguments, report = setup.arguments, setup.report
    is_file = arguments.checkpoint.endswith(SUFFIX)  # as a user names it
    setup.options["model"] = os.path.abspath(arguments.checkpoint) if is_file else str(setup.folder)
    rounds = range(1, arguments.rounds + 1)
    if arguments.vllm:
        check_vllm(arguments.vllm)
    if arguments.llama_bin:
        programs = LlamaCpp(arguments.llama_bin, num_cpu_threads(None, 1))
        report.note("llama.cpp's system line", programs.check(cpu_flags(), arguments.llama_unused))
        file = gguf_file(sys.executable, setup.folder, "BF16")
        setup.options.setdefault("http", f"{HOST}:{free_port()}")  # llama-server listens, too
        first_tokens, theirs = [], []
        for number in rounds:
            first_tokens.append(measure_ours(setup, number, number == arguments.rounds))
            theirs.append(measure_llama_server(setup, number, programs, file))
        report.note_ratios("first token, of llama-server's time", first_tokens, theirs)
    else:
        first_tokens = [measure_ours(setup, number, number == arguments.rounds) for number in rounds]
    if arguments.vllm:
        for name, is_eager in (("vLLM, eager", True), ("vLLM, first start", False)):
            seconds = vllm_first_token_s(arguments.vllm, setup.folder, is_eager)
            report.add(engine=name, first_token_s=seconds)
            report.note(f"{name}: relative to ours", seconds / median(first_tokens))


OPTIONS = {
    "--vllm": (None, "the Python of an environment with vLLM"),
    "--llama-bin": (None, "the folder of llama.cpp's programs, built with its libraries", Path),
    **UNUSED,
    "--idle-s": (10.0, "how long to measure idle CPU; 0: not at all"),
}
CASE = Case("start-up", measure, OPTIONS)
