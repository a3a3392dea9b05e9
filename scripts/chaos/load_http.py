"""Stream with many HTTP clients for a long time: no request fails, nothing grows, /health stays fast.

    python scripts/chaos/load_http.py --minutes 10 --streams 500

Starts an engine on the demo model with one compute thread. Each of --streams connections requests one answer after the
other, of 16 to 128 tokens; meanwhile another process requests /health ten times a second. Prints requests, tokens,
failures, the times of /health, and each process's growth between one third of the time and its end. Exit code 1 if
any of these is out of bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tokenloom.scripts.bench.cases.sse import Stream
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.report import percentile, print_json
from tokenloom.scripts.bench.runner import read_options
from tokenloom.scripts.chaos.soak import measure

ENGINE_FLAGS = ("--http", "0", "--device", "cpu", "--num-threads", "1")
# per stream: small enough that all of it is touched in the first third, else it would count as growth
CACHE_BYTES = 192 << 10
HEALTH_LIMIT_MS = 200.0  # p99
# a worker's arena stops growing once it has seen every batch size
GROWTH_LIMIT_MB = {"core": 4.0, "frontend": 8.0, "worker 0": 32.0}
PROBE_INTERVAL_S = 0.1
PATIENCE_S = 300.0  # for an answer
COUNTRIES = ("France", "Peru", "Japan", "Chad", "Norway", "Kenya")


class Load:
    """The streams of one run and their outcomes."""

    def __init__(self, url: str) -> None:
        self._port = urlsplit(url).port or 80
        self.num_requests = self.num_tokens = 0
        self.failures: list[str] = []
        self._end = 0.0

    async def run(self, num_streams: int, duration_s: float) -> None:
        self._end = time.monotonic() + duration_s
        await asyncio.gather(*(self._stream(random.Random(seed)) for seed in range(num_streams)))

    async def _stream(self, rng: random.Random) -> None:
        while time.monotonic() < self._end:
            wanted = rng.randrange(16, 129)
            question = f"What is the capital of {rng.choice(COUNTRIES)}?"
            try:
                got = await self._ask(question, wanted)
                if got != wanted:
                    self.failures.append(f"{got} tokens instead of {wanted}")
            except (OSError, TimeoutError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self.num_requests += 1

    async def _ask(self, question: str, num_tokens: int) -> int:
        """Return the token count in the usage of one streamed answer."""
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": num_tokens, "ignore_eos": True}
        text = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
        stream = await Stream.open(self._port, "/v1/chat/completions", text.encode())
        got = await stream.num_tokens(PATIENCE_S)
        self.num_tokens += got
        return got


def start_probe(url: str, interval_s: float) -> subprocess.Popen[bytes]:
    """Run `probe` in another process until its stdin is closed."""
    command = [sys.executable, "-P", __file__, "--probe", url, "--interval-s", str(interval_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def probe(url: str, interval_s: float) -> int:
    """Request /health on new connections until stdin closes; print the times in ms and the failures."""
    parts, times_ms, failures = urlsplit(url), list[float](), list[str]()
    while not select.select([sys.stdin], [], [], interval_s)[0]:
        begun = time.monotonic()
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                failures.append(f"/health: {answer.status}")
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"/health: {error}")
        finally:
            connection.close()
        times_ms.append(1000 * (time.monotonic() - begun))
    print(json.dumps([times_ms, failures]))
    return 0


def load(minutes: float, num_streams: int, interval_s: float) -> dict[str, object]:
    sizes = ["--max-num-seqs", str(num_streams), "--kv-cache-memory-bytes", str(num_streams * CACHE_BYTES)]
    with tempfile.TemporaryDirectory() as runtime, Engine(Path(runtime), [*ENGINE_FLAGS, *sizes]) as engine:
        engine.wait_ready()
        streams = Load(engine.url)
        prober = start_probe(engine.url, interval_s)
        sampled: list[dict[str, tuple[float, int]]] = []
        try:
            processes = {role: process for role in GROWTH_LIMIT_MB if (process := engine.find(role)) is not None}
            timers = [threading.Timer(minutes * 60 * share, sample, (processes, sampled)) for share in (1 / 3, 1)]
            for each in timers:
                each.start()
            asyncio.run(streams.run(num_streams, minutes * 60))
            for each in timers:
                each.join()
            times_ms, failed_probes = json.loads(prober.communicate(timeout=PATIENCE_S)[0])
            code = engine.stop()
        finally:
            prober.kill()
            prober.communicate()
    middle, end = sampled
    replaced = [f"{role} was replaced" for role in GROWTH_LIMIT_MB if role not in end]
    return {
        "minutes": minutes,
        "streams": num_streams,
        "requests": streams.num_requests,
        "tokens": streams.num_tokens,
        "failures": dict(Counter(streams.failures + failed_probes + replaced)),
        "/health in ms": {"p50": statistics.median(times_ms), "p99": percentile(times_ms, 99), "max": max(times_ms)},
        "growth in MB over the last two thirds": {role: round(end[role][0] - middle[role][0], 2) for role in end},
        "exit code": code,
    }


def sample(processes: dict[str, psutil.Process], sampled: list[dict[str, tuple[float, int]]]) -> None:
    """Measure the processes that have not been replaced."""
    sampled.append(measure({role: process for role, process in processes.items() if process.is_running()}))


def is_clean(report: dict[str, object]) -> bool:
    growth, health = report["growth in MB over the last two thirds"], report["/health in ms"]
    assert isinstance(growth, dict) and isinstance(health, dict)
    is_small = all(growth[role] <= GROWTH_LIMIT_MB[role] for role in growth)
    return not report["failures"] and report["exit code"] == 0 and is_small and health["p99"] <= HEALTH_LIMIT_MS


OPTIONS = {
    "--minutes": (10.0,),
    "--streams": (500,),
    "--probe": (None, argparse.SUPPRESS),  # in a process of its own
    "--interval-s": (PROBE_INTERVAL_S, "between two requests of /health"),
}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    if arguments.probe:
        return probe(arguments.probe, arguments.interval_s)
    report = load(arguments.minutes, arguments.streams, arguments.interval_s)
    print_json(report, arguments.json)
    return 0 if is_clean(report) else 1


if __name__ == "__main__":
    sys.exit(main())
