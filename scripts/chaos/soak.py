"""Run mixed traffic with aborts and timeouts for a long time; core, frontend and worker must not grow.

    python scripts/chaos/soak.py --minutes 30

Prints each process's growth between one third of the time and its end, its sockets and descriptors.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

from tokenloom import Client
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.report import print_json
from tokenloom.scripts.bench.runner import read_options
from tokenloom.tests.support.chaos_work import make_work

ROLES = ("core", "frontend", "worker 0", "grammar", "prover")
LIMIT_MB = {"core": 2.0, "frontend": 2.0, "worker 0": 16.0, "grammar": 16.0, "prover": 16.0}


def traffic(address: str, seed: int, stop: threading.Event, counts: Counter[str]) -> None:
    """Send requests until `stop` is set: completed, aborted, timed out or in batches; a new client every 50 of them."""
    rng = random.Random(seed)
    work = make_work(rng)
    while not stop.is_set():
        with Client(address) as client:
            for _ in range(50):
                if stop.is_set():
                    return
                each, kind = rng.choice(work), rng.random()
                if kind < 0.3:
                    future = client.submit(each.prompt, each.params, request_id="to-abort")
                    stop.wait(rng.random() * 0.3)
                    client.abort("to-abort")
                    outputs = [future.result()]
                elif kind < 0.5:
                    params = each.params.replace(timeout_s=rng.uniform(0.01, 0.3))
                    outputs = client.generate(each.prompt, params, use_tqdm=False)
                elif kind < 0.8:
                    outputs = client.generate(each.prompt, each.params, use_tqdm=False)
                else:
                    chosen = [rng.choice(work) for _ in range(8)]
                    prompts, params_of = [one.prompt for one in chosen], [one.params for one in chosen]
                    outputs = client.generate(prompts, params_of, use_tqdm=False)
                counts.update(str(answer.finish_reason) for output in outputs for answer in output.outputs)


def measure(processes: dict[str, psutil.Process]) -> dict[str, tuple[float, int]]:
    """Return each process's anonymous memory in MB and number of descriptors. File pages do not count: whether they are
    private depends on the other processes that map the same library."""
    return {role: (_anonymous_mb(process.pid), process.num_fds()) for role, process in processes.items()}


def _anonymous_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def soak(minutes: float, num_clients: int) -> dict[str, object]:
    options = ["--device", "cpu", "--num-threads", "1", "--max-num-seqs", "32"]
    options += ["--kv-cache-memory-bytes", str(64 << 20)]
    with tempfile.TemporaryDirectory() as runtime, Engine(Path(runtime), options) as engine:
        engine.wait_ready()
        stop, counts = threading.Event(), Counter[str]()
        threads = [
            threading.Thread(target=traffic, args=(engine.address, seed, stop, counts)) for seed in range(num_clients)
        ]
        for thread in threads:
            thread.start()
        time.sleep(minutes * 60 / 3)
        processes = {role: process for role in ROLES if (process := engine.find(role)) is not None}
        middle = measure(processes)
        time.sleep(minutes * 60 * 2 / 3)
        end = measure(processes)
        stop.set()
        for thread in threads:
            thread.join(60)
        code = engine.stop()
    return {
        "minutes": minutes,
        "answers by finish reason": dict(counts),
        "growth in MB over the last two thirds": {role: round(end[role][0] - middle[role][0], 2) for role in ROLES},
        "descriptors": {role: [middle[role][1], end[role][1]] for role in ROLES},
        "exit code": code,
    }


OPTIONS = {"--minutes": (30.0,), "--clients": (4,)}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    report = soak(arguments.minutes, arguments.clients)
    print_json(report, arguments.json)
    growth = report["growth in MB over the last two thirds"]
    assert isinstance(growth, dict)
    return 0 if all(growth[role] <= LIMIT_MB[role] for role in ROLES) and report["exit code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
