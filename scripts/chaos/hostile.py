"""Attack an engine with the inputs of hostile callers, beside bystanders: nobody is cut, nothing pauses or stays.

    python scripts/chaos/hostile.py                     each attack alone
    python scripts/chaos/hostile.py --crowd-s 60        200 hostile bodies of eight callers beside 8 streams
    python scripts/chaos/hostile.py --crowd-s 60 --crowd-bodies 0   as many as the eight get answered
    python scripts/chaos/hostile.py --mixture-s 600     all attacks at random, beside requests whose answers are known

Starts an engine on the demo model, or on --model, with one compute thread. For each attack it prints the answers by
status, the longest pause of a bystander's stream, the memory that its processes keep afterwards, their CPU time in the
second that follows it, and the processes that were lost. Exit code 1 if a limit is exceeded; the limits and the load
of the machine are printed.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
import zmq

from tokenloom import Client, RequestOutput
from tokenloom.ipc.codec import encode
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.report import Report, percentile
from tokenloom.scripts.bench.runner import read_options
from tokenloom.scripts.chaos import hostile_inputs as inputs
from tokenloom.scripts.chaos.hostile_bystander import Watch
from tokenloom.scripts.chaos.soak import measure
from tokenloom.tests.support.chaos_work import Work, difference, make_work

ENGINE_FLAGS = ("--http", "0", "--device", "cpu", "--num-threads", "1", "--dtype", "float32", "--max-num-seqs", "64")
DEMO_OPTIONS = ("--kv-cache-memory-bytes", str(20 << 20))  # its pages become memory at their first use
ROLES = ("supervisor", "frontend", "core", "worker 0")  # lost if their process is another one
PATIENCE_S = 120.0  # for one answer
RAW_S = 4.0  # of an endless connection, if the server does not close it
RAW_BYTES = 64 << 20
FRAMES_S = 10.0  # to send one frame
SETTLE_S = 1.5
PAUSE_LIMIT_S = 2.0
KEPT_LIMIT_MB = 24.0  # of any process; the first use of a part loads it
KEPT_GRAMMAR_MB = (
    64.0  # of the grammar process, which keeps a grammar for the next request (core/features/grammar/compiler.py)
)
CPU_LIMIT_S = 0.3  # in the second after an attack, of processes that bystanders do not use
IDLE_SHARE = 0.1  # of a core
CROWD_RATIO = 3.0  # p99 of the gaps between tokens, to that of the calm
NUM_CALLERS, NUM_STREAMS, NUM_BODIES = 8, 4, 200  # streams: of HTTP, and of the library
GROWTH_LIMIT_MB = 16.0  # over the last two thirds of a mixture
REFUSED_OR_SERVED = frozenset((200, 400, 404, 408, 413, 414, 415, 422, 429, 431, 503))


class Attack(NamedTuple):
    """`run` sends it and returns the answers by status, or by the error of a connection."""

    name: str
    run: Callable[[], Counter[str]]
    is_raw: bool = False  # its connections may be closed without an answer


def send_body(url: str, body: inputs.Body) -> Counter[str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        try:
            connection.request("POST", body.path, body.content, body.headers)
            answer = connection.getresponse()
            answer.read()
        except (BrokenPipeError, ConnectionResetError, http.client.HTTPException, TimeoutError) as error:
            return Counter([type(error).__name__])
    return Counter([str(answer.status)])


def send_endless(url: str, first: bytes, more: bytes) -> Counter[str]:
    """Send `first`, then `more` again and again until the server closes, RAW_S or RAW_BYTES."""
    parts, num_bytes, end = urlsplit(url), 0, time.monotonic() + RAW_S
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=RAW_S) as connection:
        try:
            connection.sendall(first)
            while time.monotonic() < end and num_bytes < RAW_BYTES:
                connection.sendall(more)
                num_bytes += len(more)
            status = "left open"
        except TimeoutError:
            status = "not read"
        except OSError:
            status = "closed"
        with contextlib.suppress(OSError):
            connection.settimeout(0.2)
            if (head := connection.recv(64)).startswith(b"HTTP/1.1 "):
                status = head[9:12].decode()
    return Counter([status])


def send_frames(address: str, frames: Sequence[bytes]) -> Counter[str]:
    """Send frames of a client that reads nothing, and leave; the engine may stop reading from it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 1000
        client.sndtimeo = client.rcvtimeo = int(FRAMES_S * 1000)
        client.connect(address)
        client.send(encode(Hello(protocol_version=PROTOCOL_VERSION)))
        answers = Counter[str]()
        with contextlib.suppress(zmq.Again):
            client.recv()
            for frame in frames:
                client.send(frame)
                answers["frames"] += 1
    return answers


def attacks(engine: Engine) -> Iterator[Attack]:
    for body in inputs.bodies():
        yield Attack(body.name, partial(send_body, engine.url, body))
    for name, first, more in inputs.connections():
        yield Attack(name, partial(send_endless, engine.url, first, more), is_raw=True)
    for name, frames in inputs.frames():
        yield Attack(f"client socket: {name}", partial(send_frames, engine.address, frames), is_raw=True)


# ── the engine's processes ────────────────────────────────────────────────────────────────────────────────────────────


class Processes:
    """The engine's processes at one moment: their memory, CPU time and pids."""

    def __init__(self, engine: Engine) -> None:
        self.by_name: dict[str, psutil.Process] = {}
        for process in engine.processes():
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline()).strip().removeprefix("tokenloom ")
                self.by_name["supervisor" if process.pid == engine.process.pid else f"{title}"] = process
        self.mb: dict[int, float] = {}
        for process in self.by_name.values():
            with contextlib.suppress(OSError, psutil.Error):
                self.mb[process.pid] = measure({"": process})[""][0]

    def kept(self, before: Processes) -> tuple[float, str]:
        """Return the largest growth in MB of a process that lived before, too, and its name; it may be negative."""
        alive = ((name, process.pid) for name, process in self.by_name.items())
        grown = ((self.mb[pid] - before.mb[pid], name) for name, pid in alive if pid in self.mb and pid in before.mb)
        return max(grown, default=(0.0, ""))

    def lost(self, before: Processes) -> list[str]:
        """Return the names of the processes in ROLES that are not those of before."""
        pids = [{name: process.pid for name, process in each.by_name.items()} for each in (before, self)]
        return [role for role in ROLES if role in pids[0] and pids[0][role] != pids[1].get(role)]

    def busy_s(self, seconds: float) -> float:
        """Return the CPU time that the processes outside of ROLES take in the next seconds."""
        return _busy_s([process for name, process in self.by_name.items() if name not in ROLES], seconds)

    def total_busy_s(self, seconds: float) -> float:
        """Return the CPU time that all processes take in the next seconds."""
        return _busy_s(list(self.by_name.values()), seconds)


def _busy_s(processes: Sequence[psutil.Process], seconds: float) -> float:
    begun = [_cpu_s(process) for process in processes]
    time.sleep(seconds)
    return sum(_cpu_s(process) - before for process, before in zip(processes, begun, strict=True))


def wait_idle(engine: Engine) -> None:
    """Wait until the engine has ended the work that the attackers have left in its queues, for PATIENCE_S at most."""
    deadline = time.monotonic() + PATIENCE_S
    while Processes(engine).total_busy_s(SETTLE_S) > IDLE_SHARE * SETTLE_S and time.monotonic() < deadline:
        pass


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def one_by_one(
    engine: Engine, chosen: Sequence[Attack], settle_s: float, pause_limit_s: float, report: Report
) -> list[str]:
    """Run each attack alone, beside two streams; return the exceeded limits. `settle_s`: of the engine after each; with
    0 memory and CPU time are not measured."""
    faults: list[str] = []
    watch = Watch(engine.url, engine.address, 1, 1)
    try:
        time.sleep(settle_s)
        for attack in chosen:
            watch.take()
            before = Processes(engine)
            begun = time.monotonic()
            answers = attack.run()
            taken_s = time.monotonic() - begun
            time.sleep(settle_s)
            gaps, cuts = watch.take()
            after = Processes(engine)
            kept_mb, keeper = after.kept(before)
            row = {
                "attack": attack.name,
                "answers": ", ".join(f"{number} × {status}" for status, number in answers.items()),
                "seconds": round(taken_s, 2),
                "longest pause in s": round(max(gaps), 2),
                "memory kept in MB": round(kept_mb, 1) if settle_s else None,
                "by": keeper if settle_s and kept_mb > 1 else "",
                "CPU after it in s": round(after.busy_s(1.0), 2) if settle_s else None,
                "lost": " ".join(after.lost(before)),
                "cut": len(cuts),
                "load": round(os.getloadavg()[0], 1),
            }
            report.add(**row)  # type: ignore[arg-type]
            print(row, file=sys.stderr)
            faults += faults_of(row, answers, attack, cuts, pause_limit_s)
    finally:
        watch.close()
    return faults


def faults_of(
    row: dict[str, object], answers: Counter[str], attack: Attack, cuts: Sequence[str], pause_limit_s: float
) -> list[str]:
    """Return a line for each limit that the row of an attack exceeds."""
    found = [f"{attack.name}: a stream was cut: {cut}" for cut in cuts]
    limits = {
        "longest pause in s": pause_limit_s,
        "memory kept in MB": KEPT_GRAMMAR_MB if row["by"] == "grammar" else KEPT_LIMIT_MB,
        "CPU after it in s": CPU_LIMIT_S,
    }
    for name, limit in limits.items():
        value = row[name]
        if isinstance(value, int | float) and value > limit:
            found.append(f"{attack.name}: {name}: {value}, at most {limit}")
    if row["lost"]:
        found.append(f"{attack.name}: {row['lost']} was lost")
    if not attack.is_raw:
        bad = [status for status in answers if not status.isdigit() or int(status) not in REFUSED_OR_SERVED]
        found += [f"{attack.name}: answered with {status}" for status in bad]
    return found


def crowd(engine: Engine, seconds: float, num_bodies: int, report: Report) -> list[str]:
    """Let NUM_CALLERS callers send hostile bodies, `num_bodies` spread over the time or, with 0, without a rest, beside
    streams of HTTP and of the library; compare the gaps between tokens with those of as long a calm."""
    watch = Watch(engine.url, engine.address, NUM_STREAMS, NUM_STREAMS)
    bodies, before = list(inputs.bodies()), Processes(engine)
    try:
        time.sleep(SETTLE_S)
        watch.take()
        time.sleep(seconds)
        calm, _ = watch.take()
        answers, begun = Counter[str](), time.monotonic()
        pace = 0.95 * seconds / num_bodies if num_bodies else 0.0  # some more, as one that is late sends fewer
        lock, rest_s = threading.Lock(), NUM_CALLERS * pace

        def call(rng: random.Random) -> None:
            next_s = rng.random() * rest_s  # since the beginning
            while (now_s := time.monotonic() - begun) < seconds:
                if now_s < next_s:
                    time.sleep(min(next_s, seconds) - now_s)
                    continue
                next_s += rest_s
                found = send_body(engine.url, rng.choice(bodies))
                with lock:
                    answers.update(found)

        callers = [threading.Thread(target=call, args=(random.Random(seed),)) for seed in range(NUM_CALLERS)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        attacked, cuts = watch.take()
        after = Processes(engine)
    finally:
        watch.close()
    ratio = percentile(attacked, 99) / percentile(calm, 99)
    report.add(
        attack=f"{NUM_CALLERS} callers for {seconds:g} s{'' if num_bodies else ' without a rest'}",
        answers=", ".join(f"{number} × {status}" for status, number in sorted(answers.items())),
        load=round(os.getloadavg()[0], 1),
        lost=" ".join(after.lost(before)),
        cut=len(cuts),
        **{
            "p50 between tokens in ms, calm": round(statistics.median(calm) * 1000, 1),
            "p99, calm": round(percentile(calm, 99) * 1000, 1),
            "p99, attacked": round(percentile(attacked, 99) * 1000, 1),
            "longest pause in s": round(max(attacked), 2),
            "ratio": round(ratio, 2),
        },
    )
    faults = [f"a stream was cut: {cut}" for cut in cuts] + [f"{each} was lost" for each in after.lost(before)]
    if sum(answers.values()) < num_bodies:
        faults.append(f"only {sum(answers.values())} of {num_bodies} bodies were answered")
    if ratio > CROWD_RATIO:
        faults.append(f"p99 between tokens is {ratio:.2f} × that of the calm, at most {CROWD_RATIO}")
    return faults


def mixture(engine: Engine, seconds: float, seed: int, report: Report) -> list[str]:
    """Run attacks at random beside real work, whose answers are compared with those of the calm."""
    rng = random.Random(seed)
    work, chosen = make_work(rng), list(attacks(engine))
    with Client(engine.address) as client:
        calm = {each.kind: _answer(client, each) for each in work}
    faults, counts, is_over, lock = list[str](), Counter[str](), threading.Event(), threading.Lock()

    def attack(rng: random.Random) -> None:
        while not is_over.is_set():
            one = rng.choice(chosen)
            with contextlib.suppress(OSError):
                counts.update({"attacks": 1, **one.run()})

    def serve(rng: random.Random) -> None:
        while not is_over.is_set():
            with Client(engine.address, reconnect_timeout_s=PATIENCE_S) as client:
                for _ in range(20):
                    each = rng.choice(work)
                    try:
                        found = difference(calm[each.kind], _answer(client, each))
                    except Exception as error:
                        found = f"{type(error).__name__}: {error}"
                    with lock:
                        counts.update({"answers": 1})
                        faults.extend([f"{each.kind}: {found}"] if found else [])
                    if is_over.is_set():
                        return

    before = Processes(engine)
    attackers = [
        threading.Thread(target=attack, args=(random.Random(seed + i),), daemon=True) for i in range(NUM_CALLERS)
    ]
    workers = [threading.Thread(target=serve, args=(random.Random(seed + 100 + i),)) for i in range(4)]
    for thread in (*attackers, *workers):
        thread.start()
    time.sleep(seconds / 3)
    middle = Processes(engine)
    time.sleep(seconds * 2 / 3)
    is_over.set()
    for thread in workers:
        thread.join()
    for thread in attackers:
        thread.join(PATIENCE_S)
    wait_idle(engine)
    end = Processes(engine)
    growth = {
        name: end.mb[process.pid] - middle.mb[process.pid]
        for name, process in end.by_name.items()
        if process.pid in middle.mb and process.pid in end.mb
    }
    report.add(
        attack=f"a mixture for {seconds:g} s",
        answers=f"{counts['answers']}, {len(faults)} lost or changed; {counts['attacks']} attacks",
        lost=" ".join(end.lost(before)),
        load=round(os.getloadavg()[0], 1),
        **{"growth in MB": ", ".join(f"{name} {mb:.1f}" for name, mb in growth.items())},
    )
    faults += [f"{each} was lost" for each in end.lost(before)]
    faults += [f"{name} grew by {mb:.1f} MB" for name, mb in growth.items() if mb > GROWTH_LIMIT_MB]
    return faults


def _answer(client: Client, work: Work) -> RequestOutput:
    (found,) = client.generate(work.prompt, work.params, use_tqdm=False)
    return found


OPTIONS = {
    "--model": ("", "folder or file of the model; default: the demo"),
    "--only": ("", "only the attacks with this in their names"),
    "--crowd-s": (0.0, "seconds of the crowd, in place of single attacks"),
    "--crowd-bodies": (NUM_BODIES, "of the crowd; 0: as many as are answered"),
    "--mixture-s": (0.0, "seconds of the mixture, in place of single attacks"),
    "--seed": (int(time.time()), "of the mixture; default: the time"),
    "--settle-s": (SETTLE_S, "after each attack; 0: measure no memory"),
    "--pause-limit-s": (PAUSE_LIMIT_S, "of a bystander's stream"),
    "--every": (1, "only each Nth attack"),
    "--first": (0, "the first of them, from 0"),
}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    report = Report("hostile", {"model": arguments.model or "demo", "seed": arguments.seed})
    options = [*ENGINE_FLAGS, *(["--model", arguments.model] if arguments.model else DEMO_OPTIONS)]
    with tempfile.TemporaryDirectory() as runtime, Engine(Path(runtime), options) as engine:
        engine.wait_ready()
        if arguments.crowd_s:
            faults = crowd(engine, arguments.crowd_s, arguments.crowd_bodies, report)
        elif arguments.mixture_s:
            faults = mixture(engine, arguments.mixture_s, arguments.seed, report)
        else:
            chosen = [each for each in attacks(engine) if arguments.only in each.name]
            chosen = chosen[arguments.first :: arguments.every]
            faults = one_by_one(engine, chosen, arguments.settle_s, arguments.pause_limit_s, report)
        code = engine.stop()
        errors = engine.errors.read_text(encoding="utf-8")
    faults += [f"exit code {code}"] if code else []
    faults += ["a traceback is in the log"] if "Traceback" in errors else []
    report.note("limits", {"pause in s": arguments.pause_limit_s, "kept in MB": KEPT_LIMIT_MB, "CPU in s": CPU_LIMIT_S})
    report.note("faults", faults)
    report.publish(arguments.json)
    if "Traceback" in errors:
        print(errors[errors.index("Traceback") :][:3000], file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
