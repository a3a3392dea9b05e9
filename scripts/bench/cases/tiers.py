"""Measure the first token of a prompt whose KV blocks lie outside the pool, beside computing it.

    engine-launch bench tiers 135m 4096 --rounds 3 --redis redis-server

Per round, with a new prompt of IN random tokens: computed without any cache; again with its blocks on a disk (the pool
emptied) and in the pool, in the host tier (another prompt in between fills the pool), in Redis (computed by another
engine); and on the disk after SIGKILL of all processes and a start on the same folder, also with an arena of a quarter
of the prompt. Each engine is idle for --idle seconds after a warm-up request. Beside them the time in which a bare loop
reads these objects with O_DIRECT. Printed: medians, their ratio to computing, and the rate at which blocks came from
the disk (without the time that the request takes with its blocks in the pool) as a share of that loop's. A hit asserts
that all blocks but the last were found.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tokenloom import LLM, RequestOutput, SamplingParams
from tokenloom.scripts.bench.contestant import median_ratio
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import FIRST_ID, vocab_size

SETTLE_S = 30.0
IDLE_S = 1.0  # before the first request of an engine, which takes memory ahead meanwhile, at 0.4 to 2 GB/s
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class Bench:
    """The engines' options, and the times of each case by round."""

    def __init__(self, setup: Setup, num_in: int, redis: str) -> None:
        self.setup, self.num_in, self.redis = setup, num_in, redis
        self.times: dict[str, list[float]] = defaultdict(list)
        self.root = Path(tempfile.mkdtemp(prefix="bench-tiers-", dir=os.environ.get("TMPDIR")))
        self.object_bytes = 0
        self._names = 0

    def options(self, **more: object) -> dict[str, object]:
        return {"max_model_len": self.num_in + 64, **self.setup.options, **more}

    def prompt(self, name: str) -> list[int]:
        draw = random.Random(f"{name} {self._names}")
        return draw.choices(range(FIRST_ID, vocab_size(self.setup.folder)), k=self.num_in)

    def measure(self, llm: LLM, case: str, prompt: list[int], *, is_hit: bool) -> None:
        """Time one request for one token; record it under `case` unless that is empty."""
        begun = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], ONE_TOKEN, use_tqdm=False)
        seconds = time.perf_counter() - begun
        expected = (self.num_in - 1) // 16 * 16 if is_hit else 0
        assert _num_cached(output) == expected, f"{case}: {_num_cached(output)} tokens found, {expected} expected"
        if case:
            self.times[case].append(seconds)

    def round(self, number: int) -> None:
        self._names = number
        folder = self.root / f"disk-{number}"
        with self.engine(kv_disk=str(folder)) as llm:
            self.measure(llm, "computed", self.prompt("a"), is_hit=False)
            self.wait_written(folder)
            llm.reset_prefix_cache()
            self.measure(llm, "disk", self.prompt("a"), is_hit=True)
            self.measure(llm, "pool", self.prompt("a"), is_hit=True)
            self.times["bare O_DIRECT reads"].append(read_all(folder))
            self.kill_all()
        with self.engine(kv_disk=str(folder)) as llm:
            self.measure(llm, "disk, after SIGKILL of everything", self.prompt("a"), is_hit=True)
        with self.engine(kv_disk=str(folder), kv_host_bytes=self.arena_bytes // 4) as llm:
            self.measure(llm, "disk, through a quarter of the prompt's memory", self.prompt("a"), is_hit=True)
        shutil.rmtree(folder)
        pool = self.num_in // 16 + 20
        with self.engine(kv_host_bytes=2 * self.arena_bytes, num_kv_blocks=pool) as llm:
            self.measure(llm, "", self.prompt("b"), is_hit=False)
            self.measure(llm, "", self.prompt("c"), is_hit=False)
            self.measure(llm, "host tier", self.prompt("b"), is_hit=True)
        if self.redis:
            with redis_server(self.redis, self.root):
                address = f"unix://{self.root}/redis.sock"
                with self.engine(kv_remote=address) as llm:
                    self.measure(llm, "", self.prompt("d"), is_hit=False)
                    self.measure(llm, "", self.prompt("d"), is_hit=True)
                    time.sleep(3.0)
                with self.engine(kv_remote=address) as llm:
                    self.measure(llm, "Redis, from another engine", self.prompt("d"), is_hit=True)

    @property
    def arena_bytes(self) -> int:
        """Bytes of all blocks of a prompt."""
        return self.num_in // 16 * self.object_bytes

    @contextlib.contextmanager
    def engine(self, **more: object) -> Iterator[LLM]:
        """Run an engine: wait until its sources are open, send a warm-up request, wait --idle seconds, and yield it."""
        llm = LLM(self.setup.folder, **self.options(**more))
        try:
            if set(more) - {"kv_host_bytes", "num_kv_blocks"}:
                wait_until(lambda: is_up(llm), "the tier does not open")
            llm.generate([{"prompt_token_ids": self.prompt("warm-up")[:40]}], ONE_TOKEN, use_tqdm=False)
            time.sleep(self.setup.arguments.idle)
            yield llm
        finally:
            with contextlib.suppress(Exception):
                llm.close()

    def wait_written(self, folder: Path) -> None:
        """Wait until all full blocks of a prompt lie in `folder`."""
        num_blocks = self.num_in // 16
        wait_until(lambda: len(objects(folder)) >= num_blocks, f"{folder} does not fill")
        self.object_bytes = self.object_bytes or objects(folder)[0].stat().st_size

    def kill_all(self) -> None:
        """Kill every process of the engine at once with SIGKILL."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ends with one that was killed before it
                if " ".join(process.cmdline()).startswith("tokenloom"):
                    process.kill()


def _num_cached(output: RequestOutput) -> int:
    return output.num_cached_tokens or 0


def is_up(llm: LLM) -> bool:
    """Return whether every configured source is open."""
    values = [getattr(metric, "value", 0) for metric in llm.get_metrics() if metric.name == "tokenloom_tier_up"]
    return bool(values) and all(values)


def wait_until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(complaint)
        time.sleep(0.05)


@contextlib.contextmanager
def redis_server(program: str, root: Path) -> Iterator[int]:
    """Run a server without persistence on `root`/redis.sock; yield its TCP port on the loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    path = root / "redis.sock"
    options = ["--unixsocket", str(path), "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(root)]
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists, "Redis does not start")
        yield port
    finally:
        server.kill()
        server.wait()


def objects(folder: Path) -> list[Path]:
    """Return the files of blocks in a folder of --kv-disk."""
    return [path for path in folder.glob("*/*/*") if path.is_file() and not path.name.startswith(".")]


def read_all(folder: Path) -> float:
    """Read every object with O_DIRECT by one thread; return the seconds."""
    paths = objects(folder)
    buffer = mmap.mmap(-1, max(path.stat().st_size for path in paths) + mmap.PAGESIZE)
    begun = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [buffer], 0)
        os.close(fd)
    return time.perf_counter() - begun


def measure(setup: Setup) -> None:
    bench = Bench(setup, setup.arguments.num_in, setup.arguments.redis)
    setup.stack.callback(shutil.rmtree, bench.root, ignore_errors=True)
    for number in range(setup.arguments.rounds):
        bench.round(number)
    computed = bench.times["computed"]
    for case, times in bench.times.items():
        of_computed = median_ratio(times, computed)
        setup.report.add(case=case, seconds=median(times), of_computed=of_computed, times_faster=1 / of_computed)
    for case in ("disk", "disk, after SIGKILL of everything"):
        both = zip(bench.times["bare O_DIRECT reads"], bench.times[case], bench.times["pool"], strict=True)
        rates = [bare / (loaded - pooled) for bare, loaded, pooled in both]
        setup.report.note(f"read rate, of the bare loop's: {case}", f"{median(rates):.2f}")
    setup.report.note("bytes of a prompt", bench.arena_bytes)
    setup.report.note("seconds by round", dict(bench.times))


OPTIONS = {
    "num_in": (4096, "prompt tokens"),
    "--redis": (shutil.which("redis-server") or "", "the redis-server to start"),
    "--idle": (IDLE_S, "seconds before an engine's first request, in which it takes memory ahead"),
}
CASE = Case("tiers", measure, OPTIONS, dtype="bfloat16")
