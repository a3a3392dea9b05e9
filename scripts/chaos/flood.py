"""Many clients submit far more than the engine queues: no accepted request is lost, memory stays bounded.

    python scripts/chaos/flood.py --requests 50000 --clients 20

The engine's queue is small, so most submits are first refused as Overloaded and retried by the client. One more client
never reads its answers. Prints the counts of answers and the growth of core and frontend.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import zmq

from tokenloom import Client, SamplingParams
from tokenloom.ipc.codec import encode, encode_ids
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello
from tokenloom.ipc.messages.client import Submit
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.report import print_json
from tokenloom.scripts.bench.runner import read_options


def ask(address: str, count: int, results: list[int]) -> None:
    """Run one client's share of short greedy requests; append to `results` how many got all their four tokens."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with Client(address) as client:
        outputs = client.generate([[5 + i % 50, 6, 7] for i in range(count)], params, use_tqdm=False)
        results.append(sum(len(output.outputs[0].token_ids) == 4 for output in outputs))


class DeafClient:
    """Submits a long answer and keeps its lease, but reads nothing from its socket."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(16))
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.connect(address)
        self._socket.send(encode(Hello(protocol_version=PROTOCOL_VERSION)))
        params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        for i in range(4):
            submit = Submit(request_id=f"deaf-{i}", params=params, prompt_token_ids=encode_ids([5, 6, 7]))
            self._socket.send(encode(submit))

    def close(self) -> None:
        self._context.destroy(linger=0)


def watch_health(address: str, threads: list[threading.Thread]) -> int:
    """Poll health until all threads have ended; return how often a busy engine reported not ready or stalled."""
    num_bad = 0
    with Client(address) as client:
        while any(thread.is_alive() for thread in threads):
            health = client.health()
            num_bad += not health.is_ready or health.is_stalled
            threads[0].join(0.2)
    return num_bad


def flood(num_requests: int, num_clients: int, queue: int) -> dict[str, object]:
    options = ["--device", "cpu", "--num-threads", "1", "--max-num-seqs", "128", "--max-waiting-requests", str(queue)]
    with tempfile.TemporaryDirectory() as runtime, Engine(Path(runtime), options) as engine:
        engine.wait_ready()
        roles = {role: engine.find(role) for role in ("core", "frontend")}
        before = {role: _megabytes(process) for role, process in roles.items()}
        deaf = DeafClient(engine.address)
        results: list[int] = []
        share = num_requests // num_clients
        threads = [threading.Thread(target=ask, args=(engine.address, share, results)) for _ in range(num_clients)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        num_bad = watch_health(engine.address, threads)
        elapsed = time.monotonic() - begun
        growth = {role: round(_megabytes(process) - before[role], 1) for role, process in roles.items()}
        deaf.close()
        code = engine.stop()
    return {
        "requests": share * num_clients,
        "answered in full": sum(results),
        "requests/s": round(share * num_clients / elapsed, 1),
        "growth in MB": growth,
        "health answers that call it unwell": num_bad,
        "exit code": code,
    }


def _megabytes(process: psutil.Process | None) -> float:
    return 0.0 if process is None else float(process.memory_info().rss) / 2**20


OPTIONS = {"--requests": (50_000,), "--clients": (20,), "--queue": (512, "requests that may wait")}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    report = flood(arguments.num_requests, arguments.clients, arguments.queue)
    print_json(report, arguments.json)
    is_whole = report["requests"] == report["answered in full"]
    return 0 if is_whole and not report["health answers that call it unwell"] and report["exit code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
