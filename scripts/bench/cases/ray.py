"""Measure an engine on Ray beside one of --hosts, with tensor parallelism over two hosts that are network namespaces.

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
from tokenloom.scripts.bench.report import Report, new_parser
from tokenloom.tests.support.network_hosts import Network, SpreadEngine
from tokenloom.tests.support.ray_network import RayEngine, RayNetwork

NUM_STREAMS = 8
OPTIONS = ["--dtype", "float32", "--tp", "2", "--hosts", "2"]


def tokens_per_s(engine: Engine, num_tokens: int) -> float:
    """Return the rate of one round."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [f"{number}: the capital of Peru is" for number in range(NUM_STREAMS)]
    with Client(engine.address) as client:
        begun = time.monotonic()
        client.generate(prompts, params, use_tqdm=False)
        return NUM_STREAMS * num_tokens / (time.monotonic() - begun)


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="(20)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (64)")
    parser.add_argument("--idle-s", type=float, default=30.0, help="time of the idle measurement (30)")
    arguments = parser.parse_args()
    settings = {"pairs": arguments.pairs, "streams": NUM_STREAMS, "tokens": arguments.tokens}
    report = Report("scale", settings)
    with (
        tempfile.TemporaryDirectory() as folder,
        RayNetwork(2) as cluster,
        Network(Path(folder), 2) as hosts,
        RayEngine(cluster, *OPTIONS) as on_ray,
        SpreadEngine(hosts, *OPTIONS) as by_hand,
    ):
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
    report.publish(arguments.json)
    return 0
