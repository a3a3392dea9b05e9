"""Measure a streamed token's cost to the server: CPU time of all processes but the worker, under one HTTP client.

    engine-launch bench sse --streams 256 --out 128 --vllm ~/vllm/bin/python

N streams of /v1/completions run at once, each on its own connection, random token ids in, OUT tokens out. The client
reads bytes and counts events; its own time does not count. Ours runs null_worker.py in place of the worker: once
without delay, so that an event carries several tokens if client or server lags, and twice in steps of --step-ms, with
and without connections that outlive the frontend. vLLM (--vllm: the Python of an environment with it) serves the same
checkpoint with its worker in a process of its own, in turn with ours. Printed per round: tokens/s, tokens per event,
tokens per CPU second, and that relative to vLLM's, and to connections that are not kept. All flags of engine-launch are
taken. With --parts only this: the CPU time and the memory of the journal for connections that outlive the frontend, in
this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from tokenloom.scripts.bench.contestant import median_ratio
from tokenloom.scripts.bench.http_server import HOST, Server, free_port
from tokenloom.scripts.bench.kept_costs import kept_costs
from tokenloom.scripts.bench.processes import cpu_by_process, own_cost_s, tree, used_since
from tokenloom.scripts.bench.report import Report
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import FIRST_ID, flags_of

RUN_TIMEOUT_S = 300.0
NUM_IN = 16
NOT_KEPT = ", connections not kept"


@dataclass
class Streamed:
    """The counts and times of one run of all streams."""

    seconds: float
    num_events: int
    num_tokens: int
    cpu_s: dict[str, float] = field(default_factory=dict)


class Stream(asyncio.Protocol):
    """One connection: sends its request at once, counts events, ends with the usage that the server reports."""

    def __init__(self, request: bytes, done: asyncio.Future[int]) -> None:
        self._request, self._done = request, done
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self.num_events = 0

    @classmethod
    async def open(cls, port: int, path: str, body: bytes) -> Stream:
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        loop = asyncio.get_running_loop()
        end: asyncio.Future[int] = loop.create_future()
        _, stream = await loop.create_connection(lambda: cls(request, end), HOST, port)
        return stream

    async def num_tokens(self, timeout_s: float) -> int:
        """Wait for the end of the answer and return its token count; ConnectionError if it is incomplete."""
        return await asyncio.wait_for(self._done, timeout_s)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")
        self._tail = (self._tail + data)[-4096:]
        if b"data: [DONE]" in self._tail and not self._done.done():
            assert self._transport is not None
            usage = self._tail.rpartition(b'"completion_tokens":')[2].lstrip()
            self._done.set_result(int(usage[: next(i for i, byte in enumerate(usage) if not 48 <= byte <= 57)]))
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"the server closed a stream: {self._tail[:500]!r}"))


async def stream_all(port: int, bodies: list[bytes]) -> Streamed:
    begun = time.perf_counter()
    streams = [await Stream.open(port, "/v1/completions", body) for body in bodies]
    num_tokens = sum(await asyncio.gather(*(stream.num_tokens(RUN_TIMEOUT_S) for stream in streams)))
    num_events = sum(stream.num_events - 2 for stream in streams)  # without the events for usage and [DONE]
    return Streamed(time.perf_counter() - begun, num_events, num_tokens)


def run(server: Server, bodies: list[bytes]) -> Streamed:
    processes = tree(server.pid)
    before = cpu_by_process(processes)
    streamed = uvloop.run(stream_all(server.port, bodies))
    streamed.cpu_s = used_since(before, processes)
    return streamed


def draw_bodies(model: str, num_streams: int, num_out: int, vocab: int, seed: int) -> list[bytes]:
    draw = random.Random(seed)
    return [
        json.dumps(
            {
                "model": model,
                "prompt": draw.choices(range(FIRST_ID, vocab), k=NUM_IN),
                "max_tokens": num_out,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for _ in range(num_streams)
    ]


def our_server(name: str, folder: Path, options: dict[str, object], step_ms: float) -> Server:
    port = free_port()
    flags = flags_of({**options, "model": str(folder), "http": f"{HOST}:{port}", "served_model_name": "model"})
    command = [sys.executable, "-m", "tokenloom.scripts.bench.null_engine", *flags]
    return Server(name, command, port, {"NULL_WORKER_STEP_MS": str(step_ms)})


def vllm_server(python: str, folder: Path, num_streams: int, max_model_len: int) -> Server:
    port = free_port()
    flags = f"--host {HOST} --port {port} --served-model-name model --dtype bfloat16 --max-num-seqs {num_streams}"
    flags += f" --max-model-len {max_model_len} --enforce-eager --distributed-executor-backend mp"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *flags.split()]
    return Server("vLLM", command, port, {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"})


def servers(arguments: argparse.Namespace, folder: Path, options: dict[str, object]) -> Iterator[Server]:
    yield our_server("tokenloom, steps at once", folder, options, 0)
    slow = f"tokenloom, steps of {arguments.step_ms:g} ms"
    yield our_server(slow, folder, options, arguments.step_ms)
    yield our_server(f"{slow}{NOT_KEPT}", folder, {**options, "keep_connections": False}, arguments.step_ms)
    if arguments.vllm:
        yield vllm_server(arguments.vllm, folder, arguments.streams, NUM_IN + arguments.num_out + 8)


def measure(setup: Setup) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with us
    arguments, report = setup.arguments, setup.report
    if arguments.parts:
        report.add(**kept_costs(max(arguments.rounds, 5)))
        return
    options = {"log_level": "warning", "max_num_seqs": arguments.streams, **setup.options}
    rates: dict[str, list[float]] = {}
    started = []
    for server in servers(arguments, setup.folder, options):
        setup.stack.callback(server.stop)
        started.append(server)
    for server in started:
        server.wait_ready()
    for round_number in range(-1, arguments.rounds):  # the first warms up
        for server in started:
            vocab = setup.workload.vocab_size
            streamed = run(server, draw_bodies("model", arguments.streams, arguments.num_out, vocab, round_number))
            assert streamed.num_tokens == arguments.streams * arguments.num_out, f"{server.name} generated fewer tokens"
            if round_number >= 0:
                add_row(report, round_number, server, streamed, rates)
    for name, ours in rates.items():
        if arguments.vllm and name != "vLLM":
            report.note(f"tokens per CPU second, {name}: relative to vLLM", median_ratio(ours, rates["vLLM"]))
        if name.endswith(NOT_KEPT):
            kept = rates[name.removesuffix(NOT_KEPT)]
            report.note("tokens per CPU second, connections kept: relative to not kept", median_ratio(kept, ours))


def add_row(report: Report, number: int, server: Server, streamed: Streamed, rates: dict[str, list[float]]) -> None:
    rate = streamed.num_tokens / own_cost_s(streamed.cpu_s)
    rates.setdefault(server.name, []).append(rate)
    report.add(
        round=number + 1,
        server=server.name,
        tokens_per_s=streamed.num_tokens / streamed.seconds,
        tokens_per_event=streamed.num_tokens / streamed.num_events,
        tokens_per_cpu_s=rate,
        us_per_token=1e6 / rate,
    )
    report.note(f"CPU seconds of the last round, {server.name}", streamed.cpu_s)


OPTIONS = {
    "--streams": (256,),
    "--out": (128, "tokens of each"),
    "--step-ms": (20.0, "step time of the second null worker"),
    "--parts": (False, "only the journal's costs of a piece, a connection and a stream"),
    "--vllm": (None, "the Python of an environment with vLLM"),
}
CASE = Case("cost of a streamed token", measure, OPTIONS, model="demo", rounds=3)
