"""Measure an engine on Ray beside an engine with --hosts, with tensor parallelism over two hosts that are network
namespaces.

    engine-launch bench ray --pairs 20

Both engines run at the same time, with the demo model in float32. A round asks one of them for eight answers of
`--tokens` tokens while the other is idle; a pair is a round of each, and the order changes with each pair. Before that,
the CPU time of each engine's own processes is counted on each host while both are idle; Ray's processes, which are not
counted there, are shown by themselves. Needs root, iproute2 and ray.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from tokenloom import Client, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.processes import idle_percents
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.tests.support.network_hosts import Network, SpreadEngine
from tokenloom.tests.support.ray_network import RayEngine, RayNetwork

NUM_STREAMS = 8
ENGINE_FLAGS = ["--dtype", "float32", "--tp", "2", "--hosts", "2"]


def tokens_per_s(engine: Engine, num_tokens: int) -> float:
    """Return the rate of one round."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [f"{number}: the capital of Peru is" for number in range(NUM_STREAMS)]
    with Client(engine.address) as client:
        begun = time.monotonic()
        client.generate(prompts, params, use_tqdm=False)
        return NUM_STREAMS * num_tokens / (time.monotonic() - begun)


def measure(setup: Setup) -> None:
    arguments, report, stack = setup.arguments, setup.report, setup.stack
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    cluster, hosts = stack.enter_context(RayNetwork(2)), stack.enter_context(Network(folder, 2))
    on_ray = stack.enter_context(RayEngine(cluster, *ENGINE_FLAGS))
    by_hand = stack.enter_context(SpreadEngine(hosts, *ENGINE_FLAGS))
    agent = hosts.join(1)
    engines = {"ray": on_ray, "hosts": by_hand}
    for engine in engines.values():
        engine.wait_ready()
        tokens_per_s(engine, arguments.tokens)
    placed = cluster.processes(1, "tokenloom")
    others = [each for number in (0, 1) for each in cluster.processes(number)]
    own = {each.pid for each in (*on_ray.processes(), *placed)}
    groups = {
        "Ray engine, head": [each for each in on_ray.processes() if "launcher" not in " ".join(each.cmdline())],
        "its launcher, with Ray's threads": [on_ray.child("launcher")],
        "Ray engine, other host": placed,
        "--hosts engine, head": by_hand.processes(),
        "--hosts engine, other host": agent.processes(),
        "Ray's own processes": [each for each in others if each.pid not in own],
    }
    for name, percent in idle_percents(groups, arguments.idle_s).items():
        report.note(f"idle, {name}: % of a core", round(percent, 2))
    ratios = []
    for pair in range(arguments.pairs):
        order = list(engines) if pair % 2 else list(reversed(engines))
        rates = {name: tokens_per_s(engines[name], arguments.tokens) for name in order}
        ratios.append(rates["ray"] / rates["hosts"])
        report.add(pair=pair + 1, ray=rates["ray"], hosts=rates["hosts"], ratio=ratios[-1])
    report.note("median ratio, Ray to --hosts", round(statistics.median(ratios), 4))
    for engine in engines.values():
        engine.stop()


OPTIONS = {
    "--pairs": (20,),
    "--tokens": (64, "of each answer"),
    "--idle-s": (30.0, "time of the idle measurement"),
}
CASE = Case("ray", measure, OPTIONS, model="", rounds=0)
