"""Kills, stops and starves the processes of a serving engine while clients stream, and checks that nothing is lost.

    python scripts/chaos.py --faults 300 --clients 8 --seed 0

First every request runs undisturbed; then clients repeat them in random order while a seeded schedule of faults runs.
Each answer must equal its undisturbed one. At the end the KV pool must be all free and no process or file left. Prints
faults by kind, recovery times (from the fault to the next token of any stream) and what was recomputed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import zmq

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.ipc.codec import encode, encode_ids
from tokenloom.ipc.messages import PROTOCOL_VERSION, Hello, Submit

START_S = 60.0
RECOVERY_S = 45.0  # longest wait for the next token after a fault
SETTLE_S = 20.0
COUNTRIES = ("France", "Japan", "Italy", "Spain", "Kenya", "Peru", "India", "Canada", "Norway", "Egypt", "Cuba", "Chad")


@dataclass(frozen=True)
class Work:
    prompt: str
    params: SamplingParams


def make_work(rng: random.Random) -> list[Work]:
    """Greedy, seeded, stopped and long requests."""
    work = []
    for i, country in enumerate(COUNTRIES):
        kind = i % 4
        params = {
            0: SamplingParams(temperature=0, max_tokens=rng.randrange(40, 160), ignore_eos=True),
            1: SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=rng.randrange(40, 160), ignore_eos=True),
            2: SamplingParams(temperature=1.0, top_k=50, seed=i, max_tokens=120, stop=["the", "."], ignore_eos=True),
            3: SamplingParams(temperature=0, max_tokens=64),
        }[kind]
        work.append(Work(f"The capital of {country} is", params))
    return work


class Engine:
    """The engine under test, by the command an operator uses."""

    def __init__(self, runtime: Path, arguments: list[str], faults: str) -> None:
        self.runtime = runtime
        command = [sys.executable, "-m", "tokenloom.frontend.launch", "--device", "cpu", "--num-threads", "1"]
        environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime), "TOKENLOOM_FAULTS": faults}
        self.errors = (runtime / "stderr").open("w+")
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=self.errors, cwd="/", env=environment, text=True
        )
        self.address = self._wait_ready()
        self.seen: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _wait_ready(self) -> str:
        assert self.process.stdout is not None
        deadline, text = time.monotonic() + START_S, ""
        while select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
            data = os.read(self.process.stdout.fileno(), 1 << 16)  # select knows nothing of Python's own buffer
            text += data.decode()
            for line in text.split("\n")[:-1]:
                if line.startswith("Ready"):
                    return next(word for word in line.split() if "://" in word)
            if not data:
                break
        raise SystemExit(f"the engine did not start:\n{Path(self.errors.name).read_text()}")

    def _read(self) -> None:
        """Nothing may fill the pipe."""
        assert self.process.stdout is not None
        for _ in self.process.stdout:
            pass

    def find(self, role: str) -> psutil.Process | None:
        """The living process called `tokenloom ROLE`; None while it is being replaced."""
        for process in psutil.Process(self.process.pid).children():
            self.seen[process.pid] = process
            if title(process) == f"tokenloom {role}":
                return process
        return None

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        """Kill what is left and close the files."""
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        self.errors.close()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def leftovers(self) -> list[str]:
        """Processes and files of the engine that are still there."""
        alive = [
            str(process) for process in self.seen.values() if process.is_running() and process.status() != "zombie"
        ]
        files = [str(path) for path in (self.runtime / "tokenloom").rglob("*") if path.name != ".lock"]
        return alive + files


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:  # it has just ended
        return ""


@dataclass
class Tally:
    """What the clients saw, shared by their threads."""

    last_token_at: float = 0.0
    num_finished: int = 0
    num_tokens: int = 0
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run_client(
    address: str, work: list[Work], expected: list[RequestOutput], seed: int, tally: Tally, stop: threading.Event
) -> None:
    """Stream one piece of work after the other until told to stop, and compare each answer with its calm run."""
    rng = random.Random(seed)
    with Client(address, reconnect_timeout_s=120) as client:
        while not stop.is_set():
            index = rng.randrange(len(work))
            pieces = []
            try:
                for text in client.stream(work[index].prompt, work[index].params):
                    pieces.append(text)
                    tally.last_token_at = time.monotonic()
            except Exception as error:
                tally.failures.append(f"{type(error).__name__}: {error}")
                continue
            answer = expected[index].outputs[0]
            with tally.lock:
                tally.num_finished += 1
                tally.num_tokens += len(answer.token_ids)
                if "".join(pieces) != answer.text:
                    tally.differences.append(f"{work[index].prompt!r}: {''.join(pieces)!r}, calm {answer.text!r}")


class Faults:
    """The kinds of harm, each a method that does it; `until_mended` is whether recovery is to be waited for."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self._engine, self._rng = engine, rng
        self.kinds: dict[str, Callable[[], bool]] = {}
        for role in ("worker 0", "core", "frontend"):
            self.kinds[f"kill {role}"] = lambda role=role: self._signal(role, signal.SIGKILL)  # type: ignore[misc]
            self.kinds[f"stop {role}"] = lambda role=role: self._signal(role, signal.SIGSTOP)  # type: ignore[misc]
            self.kinds[f"delay {role}"] = lambda role=role: self._delay(role)  # type: ignore[misc]
        self.kinds["client dies"] = self._die_as_client

    def _signal(self, role: str, number: signal.Signals) -> bool:
        process = self._engine.find(role)
        if process is None:
            return False
        process.send_signal(number)
        return True

    def _delay(self, role: str) -> bool:
        process = self._engine.find(role)
        if process is None:
            return False
        process.send_signal(signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.05, 0.5))
        process.send_signal(signal.SIGCONT)
        return True

    def _die_as_client(self) -> bool:
        """A client that submits and vanishes without a word."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(16))
        socket.connect(self._engine.address)
        socket.send(encode(Hello(protocol_version=PROTOCOL_VERSION)))
        params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
        socket.send(encode(Submit(request_id="lost", params=params, prompt_token_ids=encode_ids([5, 6, 7]))))
        socket.poll(1000)
        context.destroy(linger=0)
        return True


def run(arguments: argparse.Namespace, engine: Engine) -> dict[str, object]:
    rng = random.Random(arguments.seed)
    work = make_work(rng)
    with Client(engine.address) as client:
        expected = client.generate([each.prompt for each in work], [each.params for each in work], use_tqdm=False)
        num_blocks = client.info().num_kv_blocks
    tally, stop = Tally(), threading.Event()
    clients = [
        threading.Thread(target=run_client, args=(engine.address, work, expected, seed, tally, stop))
        for seed in range(arguments.clients)
    ]
    for thread in clients:
        thread.start()
    counts, recovery = inflict(arguments.faults, Faults(engine, rng), rng, tally)
    stop.set()
    for thread in clients:
        thread.join(120)
    with Client(engine.address) as client:
        deadline = time.monotonic() + SETTLE_S
        while (health := client.health()).num_free_blocks != num_blocks and time.monotonic() < deadline:
            time.sleep(0.1)
    engine.find("")
    code = engine.stop()
    return {
        "faults": dict(counts),
        "recovery_s": {
            kind: {"median": statistics.median(times), "worst": max(times)} for kind, times in recovery.items()
        },
        "finished": tally.num_finished,
        "tokens": tally.num_tokens,
        "differences": tally.differences,
        "failures": tally.failures,
        "hung clients": sum(thread.is_alive() for thread in clients),
        "restarts": health.num_restarts,
        "recomputed tokens": health.num_recomputed_tokens,
        "blocks held at the end": num_blocks - health.num_free_blocks,
        "exit code": code,
        "left behind": engine.leftovers(),
    }


def inflict(
    count: int, faults: Faults, rng: random.Random, tally: Tally
) -> tuple[Counter[str], dict[str, list[float]]]:
    """Do `count` faults one after the other, each once the streams have recovered from the one before."""
    counts: Counter[str] = Counter()
    recovery: dict[str, list[float]] = defaultdict(list)
    while counts.total() < count:
        kind = rng.choice(list(faults.kinds))
        begun = time.monotonic()
        if not faults.kinds[kind]():
            time.sleep(0.05)
            continue
        counts[kind] += 1
        time.sleep(0.15)  # tokens that were on their way arrive
        after = time.monotonic()
        while tally.last_token_at < after:
            if time.monotonic() > begun + RECOVERY_S:
                raise SystemExit(f"no token within {RECOVERY_S} s of «{kind}» after {dict(counts)}")
            time.sleep(0.002)
        recovery[kind].append(tally.last_token_at - begun)
        time.sleep(rng.uniform(0.0, 0.4))
    return counts, recovery


def is_clean(report: dict[str, object]) -> bool:
    """Nothing lost, nothing left; differences only as rare as near ties."""
    differences, tokens = report["differences"], report["tokens"]
    assert isinstance(differences, list) and isinstance(tokens, int)
    must_be_empty = ("failures", "hung clients", "blocks held at the end", "exit code", "left behind")
    return not any(report[name] for name in must_be_empty) and len(differences) <= tokens / 1000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--exceptions", default="worker.execute:0.0005,core.turn:0.0002,frontend.turn:0.0002")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    options = ["--dtype", "float32", "--step-timeout-s", "1.5", "--hang-timeout-s", "1.5", "--max-num-seqs", "16"]
    if arguments.model:
        options += ["--model", arguments.model]
    with tempfile.TemporaryDirectory() as runtime:
        engine = Engine(Path(runtime), options, arguments.exceptions)
        try:
            report = run(arguments, engine)
        finally:
            engine.close()
            sys.stderr.write("".join(Path(engine.errors.name).read_text().splitlines(keepends=True)[-40:]))
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text)
    return 0 if is_clean(report) else 1


if __name__ == "__main__":
    sys.exit(main())
