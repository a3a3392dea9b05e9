"""Measure a gateway: what it adds to the time to the first token, and the gap in a stream whose core is killed.

    engine-launch bench gateway --requests 400 --kills 12

Two engines of the demo model and a gateway over them, all on this machine, with keys. For the first figure one engine
is up; requests of one token go in turn to its own address and to the gateway's, in pairs, with prompts that nobody has
sent before. For the second one stream runs through the gateway; the core that computes it is killed with SIGKILL, and
the gap is from the kill to the next token that the client receives. Beside it stands the time to the first token of a
prompt that is as long as the context that the other core had to compute again.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from tokenloom import Client, SamplingParams
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.http_server import free_port
from tokenloom.scripts.bench.report import Report, percentile
from tokenloom.scripts.bench.runner import Case, Setup

DEADLINE_S = 60.0
PROMPT_TOKENS = 64
OPTIONS = ["--device", "cpu", "--num-threads", "1", "--num-kv-blocks", "2048"]


class Machine:
    """Two engines with a gateway, in a folder of their own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        Keys.generate().save(folder / "key")
        self._keys = ["--hosts-key-file", str(folder / "key")]
        self.places = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.engines: list[Engine] = []
        self.gateway = self._start("gateway", ["gateway", "--cores", ",".join(self.places), "--http", "0"])

    def add_engine(self) -> None:
        number = len(self.engines)
        self.engines.append(self._start(f"engine-{number}", [*OPTIONS, "--core-listen", self.places[number]]))
        self.engines[-1].wait_ready()
        self.wait_used(number, 1)

    def _start(self, name: str, options: list[str]) -> Engine:
        runtime = self._folder / name
        runtime.mkdir()
        return self._stack.enter_context(Engine(runtime, [*options, *self._keys]))

    def worker_times(self) -> list[float]:
        """Return the CPU seconds of each engine's worker."""
        return [sum(engine.child("worker 0").cpu_times()[:2]) for engine in self.engines]

    def num_uses(self, number: int) -> int:
        line = f"the core at {self.places[number]} is used"
        return self.gateway.errors.read_text(encoding="utf-8").count(line)

    def wait_used(self, number: int, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.num_uses(number) < count:
            assert time.monotonic() < deadline, "the gateway does not find the engine"
            time.sleep(0.01)


def first_token_s(client: Client, prompt: list[int]) -> float:
    begun = time.perf_counter()
    client.submit({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=1)).result(DEADLINE_S)
    return time.perf_counter() - begun


def measure_added(machine: Machine, num_requests: int, report: Report) -> None:
    """Add rows of the times to the first token at the engine and through the gateway, and of their differences."""
    draw = random.Random(0)
    with Client(machine.engines[0].address) as direct, Client(machine.gateway.wait_ready()) as through:
        vocab_size = direct.info().vocab_size
        times: list[tuple[float, float]] = []
        for number in range(num_requests + 20):
            prompts = [[draw.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(2)]
            order = (direct, through) if number % 2 else (through, direct)
            by_client = {
                id(client): first_token_s(client, prompt) for client, prompt in zip(order, prompts, strict=True)
            }
            times.append((by_client[id(direct)], by_client[id(through)]))
    times = times[20:]  # the first ones load code
    for name, column in zip(("own frontend", "gateway"), zip(*times, strict=True), strict=True):
        values = [1000 * each for each in column]
        report.add(way=name, ttft_p50_ms=percentile(values, 50), ttft_p90_ms=percentile(values, 90))
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    report.note("gateway adds to p50, ms", 1000 * (medians[1] - medians[0]))


class Stream(threading.Thread):
    """A long answer through the gateway. `at`: the arrival times of its pieces."""

    def __init__(self, address: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._address, self._seed, self.at = address, seed, list[float]()
        self.start()

    def run(self) -> None:
        params = SamplingParams(temperature=0.8, seed=self._seed, max_tokens=1900, ignore_eos=True)
        with Client(self._address, reconnect_timeout_s=DEADLINE_S) as client:
            for _ in client.stream("The capital of Peru is", params):
                self.at.append(time.perf_counter())

    def wait(self, num_pieces: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while len(self.at) < num_pieces and self.is_alive():
            assert time.monotonic() < deadline, "the stream does not go on"
            time.sleep(0.001)


def measure_gaps(machine: Machine, num_kills: int, report: Report) -> None:
    """Add a row of the gaps after the kill of a core."""
    draw, gaps, prefills = random.Random(1), list[float](), list[float]()
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(engine.address)) for engine in machine.engines]
        vocab_size = clients[0].info().vocab_size
        for number in range(num_kills):
            stream = Stream(machine.gateway.address, number)
            stream.wait(20)
            since = machine.worker_times()
            stream.wait(120)
            spent = [now - before for now, before in zip(machine.worker_times(), since, strict=True)]
            busy = spent.index(max(spent))
            count, core = machine.num_uses(busy), machine.engines[busy].child("core")
            context = 6 + len(stream.at)
            core.kill()
            killed_at = time.perf_counter()
            num_before = len(stream.at)
            stream.wait(num_before + 20)
            gaps.append(max(b - max(a, killed_at) for a, b in itertools.pairwise(stream.at[num_before - 1 :])))
            other = clients[1 - busy]
            prefills.append(first_token_s(other, [draw.randrange(3, vocab_size) for _ in range(context)]))
            machine.wait_used(busy, count + 1)
            stream.join(DEADLINE_S)
            print(f"kill {len(gaps)}: {1000 * gaps[-1]:.0f} ms", file=sys.stderr, flush=True)
    report.add(
        way=f"{num_kills} kills of a core",
        gap_p50_ms=1000 * percentile(gaps, 50),
        gap_max_ms=1000 * max(gaps),
        prefill_p50_ms=1000 * percentile(prefills, 50),
    )


def measure(setup: Setup) -> None:
    machine = Machine(Path(setup.stack.enter_context(tempfile.TemporaryDirectory())), setup.stack)
    machine.add_engine()
    measure_added(machine, setup.arguments.num_requests, setup.report)
    machine.add_engine()
    measure_gaps(machine, setup.arguments.kills, setup.report)


CASE = Case("gateway", measure, {"--requests": (400,), "--kills": (12,)}, model="", rounds=0)
