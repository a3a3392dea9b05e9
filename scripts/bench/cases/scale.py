"""Measure an engine over two hosts, which are network namespaces joined by veth, beside the same engine on one host.

    engine-launch bench scale --json docs/reference/benchmarks/scale_hosts.json

The demo model in float32 with two ranks of one thread each. Parts, each a function: tokens per second of 8 streams, the
two engines taking turns; the round trip of a step's message over the core's kinds of sockets, tcp with CURVE between
the hosts beside ipc; the CPU of an idle engine on each host, and memory and CPU of the agent; the start, with the agent
waiting, beside a start on one host; the time from a cut link to the head's notice. Needs root.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zmq

from tokenloom import Client, SamplingParams
from tokenloom.ipc.sockets.client_auth import GROUP, ZapHandler
from tokenloom.ipc.sockets.endpoints import tcp_address
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.processes import idle_percents
from tokenloom.scripts.bench.report import Report
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.tests.support.network_hosts import Agent, Network, SpreadEngine, obstacle

ENGINE_FLAGS = ["--device", "cpu", "--num-threads", "1", "--dtype", "float32", "--tensor-parallel-size", "2"]
NUM_STREAMS, NUM_OUT = 8, 128
STEP_BYTES, RESULT_BYTES = 400, 200  # of a decode step of 8 rows and of its result
NUM_TRIPS = 2000
NOTICE_S = 30.0
CLONE_NEWNET = 0x40000000  # of sched.h


def local_engine(folder: Path) -> Engine:
    folder.mkdir()
    return Engine(folder, ENGINE_FLAGS, has_faults=False)


def spread_engine(network: Network) -> SpreadEngine:
    return SpreadEngine(network, *ENGINE_FLAGS, "--hosts", "2")


# ── tokens per second ────────────────────────────────────────────────────────────────────────────────────────────────


def measure_throughput(report: Report, engines: dict[str, Engine], num_pairs: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in engines}
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    for turn in range(num_pairs + 1):
        for name, engine in engines.items():
            with Client(engine.address) as client:
                prompts = [[turn + 7, stream + 9, *range(30, 60)] for stream in range(NUM_STREAMS)]
                begun = time.monotonic()
                client.generate(prompts, params, use_tqdm=False)
            if turn:  # the first one warms up
                rates[name].append(NUM_STREAMS * NUM_OUT / (time.monotonic() - begun))
    for name, found in rates.items():
        report.add(part="tokens/s, 8 streams", where=name, median=statistics.median(found), best=max(found))


# ── the round trip of a step ─────────────────────────────────────────────────────────────────────────────────────────


def enter(network: Network, number: int) -> None:
    """Move this thread, and the threads that it starts later, to a host's network namespace."""
    with open(f"/run/netns/{network.namespace(number)}", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def measure_round_trip(report: Report, network: Network, folder: Path) -> None:
    """Measure the round trip of a step and its result between a thread on the head and a thread on the other host, over
    each transport in turn."""
    keys = Keys.generate()
    places: dict[str, tuple[str, str]] = {}

    def echo(name: str) -> None:
        enter(network, 1 if name == "tcp, CURVE" else 0)
        with zmq.Context() as context:
            steps, results = new_socket(context, zmq.SUB), new_socket(context, zmq.PUSH)
            for socket, place in zip((steps, results), places[name], strict=True):
                if name == "tcp, CURVE":
                    keys.secure_client(socket)
                socket.connect(place)
            while steps.poll(int(NOTICE_S * 1000)) and len(steps.recv()) > 1:
                results.send(bytes(RESULT_BYTES))
            steps.close()
            results.close(1000)

    def drive() -> dict[str, list[float]]:
        enter(network, 0)
        with zmq.Context() as context, ThreadPoolExecutor(2) as pool:
            zap = ZapHandler(context, keys.client_public, GROUP)
            publisher, pull = new_socket(context, zmq.PUB), new_socket(context, zmq.PULL)
            places["ipc"] = (f"ipc://{folder}/steps", f"ipc://{folder}/results")
            for socket, place in zip((publisher, pull), places["ipc"], strict=True):
                socket.bind(place)
            tcp = [keys.listen(socket, GROUP, tcp_address(network.addresses[0], "*")) for socket in (publisher, pull)]
            places["tcp, CURVE"] = (tcp[0], tcp[1])
            trips = {}
            for name in ("ipc", "tcp, CURVE"):
                echoing = pool.submit(echo, name)
                while not pull.poll(20):  # PUB drops messages until the other side has joined
                    zap.answer()
                    publisher.send(bytes(STEP_BYTES))
                while pull.poll(100):
                    pull.recv()
                trips[name] = [_trip(publisher, pull) for _ in range(NUM_TRIPS)]
                publisher.send(b"0")
                echoing.result(NOTICE_S)
            for each in (publisher, pull, zap.socket):
                each.close(0)
        return trips

    with ThreadPoolExecutor(1) as pool:
        trips = pool.submit(drive).result(4 * NOTICE_S)
    for name, found in trips.items():
        cuts = statistics.quantiles(found, n=100)
        report.add(part="round trip of a step, µs", where=name, median=cuts[49] * 1e6, p99=cuts[98] * 1e6)


def _trip(publisher: zmq.Socket[bytes], pull: zmq.Socket[bytes]) -> float:
    begun = time.perf_counter()
    publisher.send(bytes(STEP_BYTES))
    pull.recv()
    return time.perf_counter() - begun


# ── an idle engine ───────────────────────────────────────────────────────────────────────────────────────────────────


def measure_idle(report: Report, engine: SpreadEngine, agent: Agent, seconds: float) -> None:
    hosts = {"head": engine.processes(), "other host": agent.processes()}
    hosts["its agent"] = hosts["other host"][:1]
    for name, percent in idle_percents(hosts, seconds).items():
        report.add(part="idle, % of a core", where=name, median=percent)
    memory = agent.processes()[0].memory_full_info().uss / (1 << 20)
    report.add(part="memory of the agent, MiB", where="other host", median=memory)


# ── start and cut link ───────────────────────────────────────────────────────────────────────────────────────────────


def measure_start(report: Report, network: Network, folder: Path, num_pairs: int) -> None:
    starts: dict[str, Callable[[int], Engine]] = {
        "one host": lambda turn: local_engine(folder / f"start-{turn}"),
        "two hosts": lambda turn: spread_engine(network),
    }
    times: dict[str, list[float]] = {name: [] for name in starts}
    for turn in range(num_pairs):
        for name, start in starts.items():
            begun = time.monotonic()
            with start(turn) as engine:
                engine.wait_ready()
                times[name].append(time.monotonic() - begun)
                engine.stop()
    for name, found in times.items():
        report.add(part="start, s", where=name, median=statistics.median(found), best=min(found))


def measure_cut(report: Report, network: Network, engine: SpreadEngine, agent: Agent, num_cuts: int) -> None:
    lost, joined = f"host {agent.address} is lost", f"host {agent.address} has joined"
    times = []
    for _ in range(num_cuts):
        num_lost, num_joined = engine.log().count(lost), engine.log().count(joined)
        network.cut(agent.number)
        begun = time.monotonic()
        engine.wait_log(lost, num_lost + 1)
        times.append(time.monotonic() - begun)
        network.heal(agent.number)
        engine.wait_log(joined, num_joined + 1)
        agent.wait_rank()
    report.add(part="cut link to notice, s", where="head", median=statistics.median(times), worst=max(times))


def measure_hosts(report: Report, arguments: argparse.Namespace, folder: Path) -> None:
    """Measure all parts that need engines over --hosts."""
    with Network(folder, 2) as network:
        agent = network.join(1)
        measure_round_trip(report, network, folder)
        measure_start(report, network, folder, arguments.pairs)
        with local_engine(folder / "local") as local, spread_engine(network) as spread:
            for engine in (local, spread):
                engine.wait_ready()
            measure_throughput(report, {"one host": local, "two hosts": spread}, arguments.pairs)
            local.stop()
            measure_idle(report, spread, agent, arguments.idle_seconds)
            measure_cut(report, network, spread, agent, arguments.cuts)
            spread.stop()


def measure(setup: Setup) -> None:
    if reason := obstacle():
        raise SystemExit(reason)
    measure_hosts(setup.report, setup.arguments, Path(setup.stack.enter_context(tempfile.TemporaryDirectory())))


OPTIONS = {"--pairs": (3, "runs of each engine, in turns"), "--cuts": (3,), "--idle-seconds": (20.0,)}
CASE = Case("scale", measure, OPTIONS, model="", rounds=0)
