"""Measure the engine's own cost, without a model: real frontend and core, and a worker that answers every step at once.

    engine-launch bench engine --requests 256 --out 256 --vllm ~/vllm/bin/python

Measured, for N requests that run together: CPU time of the frontend and of the core per answer token (psutil, over the
whole of prompts, tokens, detokenization and delivery to one client), and tokens/s. With --vllm (the Python of an
environment with it) vLLM's offline LLM generates the same tokens from the same checkpoint, in turn with ours; its
figure is the CPU time of all its processes except the worker, busy waiting included. Then, in this process and without
sockets, the core's median step with 1 and with N decoding rows: schedule, a null result, update, messages for the
frontend. With --submits only this: the frontend's CPU time to open a request of token ids and one of text, in this
process and without sockets, from the client's frame to the message for the core. All flags of engine-launch are taken.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from pathlib import Path

import msgspec
import psutil

from tokenloom import Client
from tokenloom.frontend.embedded.child_engine import ChildEngine
from tokenloom.ipc.codec import encode, encode_ids
from tokenloom.ipc.messages.client import Submit
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.contestant import PEERS, Ours, Peer
from tokenloom.scripts.bench.engine_steps import CoreSteps, FrontendSubmits
from tokenloom.scripts.bench.processes import cpu_by_process, own_cost_s, tree, used_since
from tokenloom.scripts.bench.report import Report, median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import Workload

NULL_ENGINE = (sys.executable, "-P", "-m", "tokenloom.scripts.bench.null_engine")
ROLES = ("frontend", "core", "null worker 0")
NUM_SUBMITS = 2000  # of a round
TEXT = "The capital of France is the largest city of the country."


def measure_cpu(config: EngineConfig, workload: Workload, rounds: int, peer: Peer | None, report: Report) -> None:
    num_tokens = workload.num_requests * workload.num_out
    ratios = []
    with contextlib.ExitStack() as stack:
        handle = ChildEngine(config, NULL_ENGINE)
        stack.callback(handle.stop)
        ours = Ours(stack.enter_context(Client(handle.addresses)))
        processes = find_roles(handle.pid)
        ours.generate(workload.prompts("warm-up"), workload.num_out)
        for number in range(rounds):
            before = {role: cpu_s(process) for role, process in processes.items()}
            seconds = ours.generate(workload.prompts(number), workload.num_out)
            used = {role: (cpu_s(process) - before[role]) / num_tokens for role, process in processes.items()}
            our_cost_s = used["frontend"] + used["core"]
            report.add(
                round=number + 1,
                engine=ours.name,
                tokens_per_s=num_tokens / seconds,
                frontend_us_per_token=used["frontend"] * 1e6,
                core_us_per_token=used["core"] * 1e6,
                us_per_token=our_cost_s * 1e6,
            )
            if peer is not None:
                ratios.append(measure_peer(peer, workload, number, report) / our_cost_s)
    if peer is not None:
        report.note("vLLM's CPU time per token relative to ours", median(ratios))


def measure_peer(peer: Peer, workload: Workload, number: int, report: Report) -> float:
    """Run the workload, add a row, and return the CPU seconds per token of all the peer's processes except the
    worker."""
    num_tokens = workload.num_requests * workload.num_out
    processes = tree(peer.pid)
    before = cpu_by_process(processes)
    seconds = peer.generate(workload.prompts(number), workload.num_out)
    used = used_since(before, processes)
    theirs = own_cost_s(used) / num_tokens
    report.add(round=number + 1, engine=peer.name, tokens_per_s=num_tokens / seconds, us_per_token=theirs * 1e6)
    report.note(f"CPU seconds of {peer.name}", used)
    return theirs


def vllm_peer(python: str, folder: Path, workload: Workload) -> Peer:
    """Start vLLM with its worker in a separate process, and warm it up."""
    lengths = ["--max-model-len", str(workload.num_in + workload.num_out + 8)]
    command = [python, str(PEERS / "vllm_peer.py"), str(folder), "--eager", "--separate-worker", *lengths]
    peer = Peer("vLLM", command, {"VLLM_CPU_KVCACHE_SPACE": "1"})
    peer.generate(workload.prompts("warm-up"), 8)
    return peer


def find_roles(supervisor_pid: int) -> dict[str, psutil.Process]:
    """Return the engine's processes by role, found by process title."""
    titles = {" ".join(each.cmdline()).strip(): each for each in psutil.Process(supervisor_pid).children()}
    found = {role: titles[f"tokenloom {role}"] for role in ROLES if f"tokenloom {role}" in titles}
    assert len(found) == len(ROLES), f"only {sorted(titles)} are running"
    return found


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def median_step_s(config: EngineConfig, num_rows: int, num_steps: int) -> float:
    """Run the core alone while `num_rows` rows decode; return the seconds of its median step."""
    steps = CoreSteps(config, num_rows, num_steps)
    seconds = []
    for _ in range(num_steps):
        begun = time.perf_counter()
        steps.schedule()
        scheduled_s = time.perf_counter() - begun
        result = steps.execute()
        begun = time.perf_counter()
        steps.update(result)
        seconds.append(scheduled_s + time.perf_counter() - begun)
    assert steps.core.num_requests == num_rows, "no row may finish while steps are timed"
    return median(seconds)


def measure_submits(config: EngineConfig, workload: Workload, rounds: int, report: Report) -> None:
    """Open requests in rounds, and report the median cost of one by the kind of its prompt."""
    ids = encode_ids(workload.prompts("submits")[0])
    params = SamplingParams(max_tokens=16)
    kinds = {
        "token ids": Submit(request_id="", params=params, prompt_token_ids=ids),
        "text": Submit(request_id="", params=params, prompt=TEXT),
    }
    logging.disable(logging.WARNING)  # of clients that are dropped with their requests
    submits = FrontendSubmits(config)
    for kind, submit in kinds.items():
        frames = [encode(msgspec.structs.replace(submit, request_id=str(number))) for number in range(NUM_SUBMITS)]
        seconds = [submits.open(frames) for _ in range(rounds)]
        report.add(prompt=kind, us_per_request=median(seconds) * 1e6, least=min(seconds) * 1e6)


def measure(setup: Setup) -> None:
    arguments, workload, report = setup.arguments, setup.workload, setup.report
    num_seqs = max(workload.num_requests, 1)
    options = {"log_level": "warning", "max_num_seqs": num_seqs, **setup.options, "model": str(setup.folder)}
    options.setdefault("max_num_batched_tokens", max(2048, int(str(options["max_num_seqs"]))))
    config = msgspec.convert(options, EngineConfig)
    if arguments.submits:
        measure_submits(config, workload, arguments.rounds, report)
        return
    with contextlib.ExitStack() as stack:
        peer = vllm_peer(arguments.vllm, setup.folder, workload) if arguments.vllm else None
        if peer is not None:
            stack.callback(peer.close)
        measure_cpu(config, workload, arguments.rounds, peer, report)
    one, many = (median_step_s(config, rows, arguments.steps) for rows in (1, workload.num_requests))
    report.note("core's median step with 1 row, µs", one * 1e6)
    report.note(f"core's median step with {workload.num_requests} rows, µs", many * 1e6)
    report.note("ratio of the two", many / one)


OPTIONS = {
    "--requests": (256,),
    "--in": (16,),
    "--out": (256,),
    "--vllm": (None, "the Python of an environment with vLLM"),
    "--submits": (False, "only the frontend's cost of opening a request"),
    "--steps": (500, "timed steps of the core alone"),
}
CASE = Case("engine without a model", measure, OPTIONS, model="demo", rounds=3)
