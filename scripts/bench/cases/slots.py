"""Compare servers of a GGUF file under load: engine-launch bench slots FILE.gguf --llama-bin FOLDER --rate 2 4

Requests with prompts of IN random tokens, which have OUT answer tokens each, arrive over HTTP at random times, --rate
of them a second on average (inf: all at once): at this engine and at llama-server with --slots slots, in turn within
each round. llama-server takes that many requests into one batch and lets the others wait; its context holds all
slots. Both stream from /v1/completions to one client of this process, both get the same gaps, and each gets prompts
that neither has seen. The set-up of llama.cpp is checked before a server starts, and its system line noted. A row:
time to the first token and per output token, p50 and p99; output tokens/s from the first arrival to the last token;
the load and the cores in use before the run. Notes: the median over the rounds of our figure relative to
llama-server's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from tokenloom.ipc.processor import cpu_flags
from tokenloom.scripts.bench.cases.compare import gguf_file
from tokenloom.scripts.bench.cases.serve import positive_rate
from tokenloom.scripts.bench.cases.served import our_server
from tokenloom.scripts.bench.contestant import ANSWER_TIMEOUT_S
from tokenloom.scripts.bench.http_server import HOST, Server
from tokenloom.scripts.bench.llama_cpp import UNUSED, LlamaCpp
from tokenloom.scripts.bench.processes import machine_now
from tokenloom.scripts.bench.report import percentile
from tokenloom.scripts.bench.runner import REQUIRED, Case, Setup
from tokenloom.scripts.bench.workload import Workload
from tokenloom.workers.machine.cpu_threads import num_cpu_threads

WARM_UP_REQUESTS = 4
COMPARED = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "out_tokens_per_s")


@dataclass
class Answer:
    """When a request was sent, its first text came, and its last; seconds since the start of the run."""

    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0


async def complete(port: int, prompt: Sequence[int], num_out: int, due_s: float, begun: float) -> Answer:
    """Send a request when it is due and read its stream to the end. SystemExit if the server refuses it."""
    await asyncio.sleep(max(due_s - (time.perf_counter() - begun), 0))
    fields = {"prompt": list(prompt), "max_tokens": num_out, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        answer = Answer(time.perf_counter() - begun)
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if int(status.split()[1]) != HTTPStatus.OK:
            raise SystemExit(f"the server refuses a request: {(await reader.read())[-2000:].decode(errors='replace')}")
        async for line in reader:
            if line.startswith(b"data: {"):
                answer.last_s = time.perf_counter() - begun
                answer.first_s = answer.first_s or answer.last_s
    finally:
        writer.close()
    if not answer.first_s:
        raise SystemExit("the server ended a stream without a token")
    return answer


async def send_load(port: int, workload: Workload, rate: float, name: str, gaps: str) -> list[Answer]:
    """Send the requests of a run. Equal names give equal prompts, equal `gaps` equal times of arrival."""
    draw, due_s, dues_s = random.Random(gaps), 0.0, list[float]()
    for _ in range(workload.num_requests):
        dues_s.append(due_s)
        due_s += draw.expovariate(1.0) / rate
    begun = time.perf_counter()
    calls = [
        complete(port, prompt, workload.num_out, due_s, begun)
        for prompt, due_s in zip(workload.prompts(name), dues_s, strict=True)
    ]
    return await asyncio.wait_for(asyncio.gather(*calls), ANSWER_TIMEOUT_S)


def figures_of(answers: Sequence[Answer], num_out: int) -> dict[str, float]:
    """Return the figures of a run. A server may hold a token back, so pieces of a stream are not counted."""
    firsts = [answer.first_s - answer.sent_s for answer in answers]
    between = [(answer.last_s - answer.first_s) / max(num_out - 1, 1) for answer in answers]
    found = dict[str, float]()
    for name, values in (("ttft", firsts), ("tpot", between)):
        for percent in (50, 99):
            found[f"{name}_p{percent}_ms"] = percentile(values, percent) * 1e3
    return found | {"out_tokens_per_s": len(answers) * num_out / max(answer.last_s for answer in answers)}


def servers_of(setup: Setup) -> list[Server]:
    """Start both servers, ours first; they end with the setup's stack."""
    given, workload = setup.arguments, setup.workload
    programs = LlamaCpp(given.llama_bin, num_cpu_threads(None, 1))
    setup.report.note("llama.cpp's system line", programs.check(cpu_flags(), given.llama_unused))
    file = gguf_file(sys.executable, setup.folder, "BF16")
    context = given.slots * (workload.num_in + workload.num_out)
    ours = our_server(setup)
    setup.stack.callback(ours.stop)
    theirs = programs.server(file, context, given.slots)
    setup.stack.callback(theirs.stop)
    servers = [ours, theirs]
    for server in servers:
        server.wait_ready()
    return servers


def measure(setup: Setup) -> None:
    given, shape = setup.arguments, setup.workload
    workload = Workload(given.num_requests, shape.num_in, shape.num_out, shape.vocab_size)
    few = Workload(WARM_UP_REQUESTS, shape.num_in, shape.num_out, shape.vocab_size)
    servers, measured = servers_of(setup), dict[tuple[float, str], list[dict[str, float]]]()
    for server in servers:
        asyncio.run(send_load(server.port, few, float("inf"), f"warm-up, {server.name}", ""))
    for number, rate, server in itertools.product(range(given.rounds), given.rate, servers):
        state = machine_now()
        name = f"{server.name}, {rate}, {number}"
        answers = asyncio.run(send_load(server.port, workload, rate, name, f"{rate}, {number}"))
        figures = figures_of(answers, workload.num_out)
        measured.setdefault((rate, server.name), []).append(figures)
        setup.report.add(round=number + 1, rate=rate, server=server.name, **figures, **state)
    ours, theirs = servers
    for rate, column in itertools.product(given.rate, COMPARED):
        columns = [[figures[column] for figures in measured[rate, server.name]] for server in (ours, theirs)]
        setup.report.note_ratios(f"{column} at {rate:g}/s, of llama-server's", *columns)


OPTIONS = {
    "--llama-bin": (REQUIRED, "the folder of llama.cpp's programs, built with its libraries", Path),
    **UNUSED,
    "--slots": (8, "requests that llama-server takes into a batch"),
    "--rate": ([2.0, float("inf")], "requests/s", positive_rate),
    "--requests": (40, "of a run"),
}
CASE = Case("slots", measure, OPTIONS, has_lengths=True, rounds=3)
