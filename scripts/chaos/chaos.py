"""Kill, stop, starve and mislead the processes of a serving engine while clients stream; check that nothing is lost.

    python scripts/chaos/chaos.py --faults 300 --clients 8 --seed 0

First every request runs undisturbed; then clients repeat them in random order while a seeded schedule of faults runs:
SIGKILL, SIGSTOP, suspensions of the whole engine, exceptions and hangs at named points of the code
(ipc/process/faults.py), starts that fail, reloads that lose a process, sockets that are late or cut, clients that
vanish, supervisors that are killed and started again. With --hosts N the ranks are on network namespaces as hosts,
beside a spare one, and ranks, agents and links join the victims (host_faults.py); with --distributed-executor-backend
ray, each has a node of a Ray cluster, and raylets, actors and the launcher join them, too (ray_faults.py). With
--kv-disk also damaged blocks and a full disk: give a small file system of its own for that. With --deterministic the
model computes in its own dtype, a GGUF file's codes as integers. With --adapters requests name random LoRA adapters,
more than the workers have slots for, whose own files are gone. With --images a small random model that sees images is
served, half of the requests have images, and the media process joins the victims. Each answer must equal its
undisturbed one in text, tokens, logprobs and finish reason. At the end the KV pool must be all free and no process or
file left. Prints faults by kind, recovery times (from the fault to the next token of any stream, or of the affected
client) and the amount of recomputation.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil

from tokenloom import Client
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.ipc.messages.client import Health
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.inputs.adapter_requests import linked_cache
from tokenloom.scripts.bench.report import print_json
from tokenloom.scripts.bench.runner import read_options
from tokenloom.scripts.chaos.clients import Clients
from tokenloom.scripts.chaos.disk_faults import DiskFaults
from tokenloom.scripts.chaos.faults import Faults
from tokenloom.scripts.chaos.host_faults import HostFaults
from tokenloom.scripts.chaos.losses import Losses
from tokenloom.scripts.chaos.ray_faults import RayFaults
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.chaos_work import Work, make_work, with_adapters, with_images, without_effect
from tokenloom.tests.support.network_hosts import Network, SpreadEngine
from tokenloom.tests.support.ray_network import RayEngine, RayNetwork

TIER_OPTIONS = ["--kv-host-bytes", "8M", "--num-kv-blocks", "256", "--max-model-len", "1900"]  # a pool for two or three
TIER_SENTENCES = 100  # of about 9 tokens before each prompt, so that loads pay
ADAPTER_SLOTS = 4
VISION_MODEL = "qwen2_5_vl"
NUM_IMAGES = 8
RECOVERY_S = 60.0  # longest wait for the next token after a fault
SETTLE_S = 20.0
NUM_LAST_LINES = 60  # of the engine's log


class Watch:
    """Sums the counters of health answers, which restart at zero with each new core."""

    def __init__(self, address: str) -> None:
        self._client = Client(address, reconnect_timeout_s=RECOVERY_S)
        self._last = 0
        self.num_recomputed_tokens = 0

    def look(self) -> Health:
        health = self._client.health()
        count = health.num_recomputed_tokens
        self.num_recomputed_tokens += count - self._last if count >= self._last else count
        self._last = count
        return health

    def wait_all_free(self, num_blocks: int) -> Health:
        deadline = time.monotonic() + SETTLE_S
        while (health := self.look()).num_free_blocks != num_blocks and time.monotonic() < deadline:
            time.sleep(0.1)
        return health

    def close(self) -> None:
        self._client.close()


def run(
    arguments: argparse.Namespace, engine: Engine, adapters: list[Path], network: Network | None = None
) -> dict[str, object]:
    """Inflict the faults and return the report. Requests name the `adapters` but the last, which only faults load.
    `network`: of the engine's hosts."""
    rng = random.Random(arguments.seed)
    disk = None if arguments.kv_disk is None else DiskFaults(Path(arguments.kv_disk), rng)
    work = make_work(rng, num_sentences=0 if disk is None else TIER_SENTENCES)
    if adapters:
        work = with_adapters(work, [path.name for path in adapters[:-1]], rng)
    if arguments.images:
        work = about_images(work, rng)
    with Client(engine.address) as client:
        calm = client.generate(
            [each.form for each in work],
            [each.params for each in work],
            use_tqdm=False,
            lora_request=[each.lora_request for each in work],
        )
        num_blocks = client.info().num_kv_blocks
    if weak := without_effect(work, calm):
        raise SystemExit(f"{', '.join(weak)}: the answers are those of the base model")
    clients = Clients(engine.address, engine.runtime, arguments.clients, work, calm, arguments.seed)
    watch, losses = Watch(engine.address), Losses()
    try:
        model = Path(arguments.model or DEMO_FOLDER)
        adapter = adapters[-1] if adapters else None
        num_ranks, has_images = arguments.tensor_parallel_size // arguments.hosts, arguments.images
        local = Faults(
            *(engine, clients, rng, losses, num_ranks, model, disk, adapter),
            has_images=has_images,
            num_replicas=arguments.data_parallel_size,
            only_signals=arguments.only_signals,
            elsewhere=partial(ranks_elsewhere, network),
        )
        faults = spread_faults(network, engine, local, losses, rng)
        limits = (arguments.faults, time.monotonic() + arguments.seconds)
        counts, recovery = inflict(*limits, faults or local, rng, clients, watch)
    finally:
        is_hung = clients.stop()
    health = watch.wait_all_free(num_blocks)
    watch.close()
    losses.close()
    engine.processes()
    code, tally = engine.stop(), clients.tally
    left = [*losses.zombies, *([] if faults is None else faults.settle())]
    return {
        "faults": dict(sorted(counts.items())),
        "recovery_s": {
            kind: {"median": round(statistics.median(times), 2), "worst": round(max(times), 2)}
            for kind, times in sorted(recovery.items())
        },
        "finished": dict(tally.finished),
        "tokens": tally.num_tokens,
        "cached tokens": tally.num_cached,
        "damaged files": {} if disk is None else dict(disk.counts),
        "differences": tally.differences,
        "failures": tally.failures,
        "hung clients": is_hung,
        "restarts": health.num_restarts,
        "recomputed tokens": watch.num_recomputed_tokens,
        "blocks held at the end": num_blocks - health.num_free_blocks,
        "exit code": code,
        "longest end of lost processes, s": round(losses.longest_end_s, 2),
        "left behind": engine.leftovers() + left,
    }


def ranks_elsewhere(network: Network | None) -> list[psutil.Process]:
    """Return the ranks on all hosts but the head."""
    if network is None:
        return []
    return [rank for number in range(1, len(network.addresses)) for rank in network.ranks(number)]


def spread_faults(
    network: Network | None, engine: Engine, local: Faults, losses: Losses, rng: random.Random
) -> HostFaults | RayFaults | None:
    """Return the faults of an engine over several hosts; None if it has one."""
    if isinstance(network, RayNetwork):
        return RayFaults(network, engine, local, losses, rng)
    return None if network is None else HostFaults(network, local, losses, rng)


def about_images(work: list[Work], rng: random.Random) -> list[Work]:
    """Return the work, and again with images of several sizes."""
    from tokenloom.tests.support.vision_configs import VISION_MODELS
    from tokenloom.tests.support.vision_oracle import random_image

    images = [random_image(index, rng.randrange(20, 300), rng.randrange(20, 300)) for index in range(NUM_IMAGES)]
    return with_images(work, VISION_MODELS[VISION_MODEL].image, images, rng)


def adapter_options(adapters: list[Path]) -> list[str]:
    """Return the options that serve the adapters but the last by the names of their folders."""
    slots = ["--max-loras", str(ADAPTER_SLOTS), "--max-lora-rank", "16"]
    return ["--enable-lora", *slots, "--lora-modules", *(f"{path.name}={path}" for path in adapters[:-1])]


def inflict(
    count: int,
    deadline: float,
    faults: Faults | HostFaults | RayFaults,
    rng: random.Random,
    clients: Clients,
    watch: Watch,
) -> tuple[Counter[str], dict[str, list[float]]]:
    """Inflict `count` faults one after the other, each once the streams have recovered from the fault before; none
    after the deadline (monotonic seconds)."""
    counts: Counter[str] = Counter()
    recovery: dict[str, list[float]] = defaultdict(list)
    while counts.total() < count and time.monotonic() < deadline:
        fault = faults.draw()
        begun = time.monotonic()
        if not fault.strike():
            continue
        counts[fault.kind] += 1
        if counts.total() % 25 == 0:
            sys.stderr.write(f"{counts.total()} faults, {clients.tally.finished.total()} answers\n")
        time.sleep(0.15)  # tokens already on their way arrive
        after = time.monotonic()
        while (last := _last_token_at(clients, fault.client)) < after:
            if time.monotonic() > after + RECOVERY_S:  # a strike may itself take long
                raise SystemExit(f"no token within {RECOVERY_S} s of «{fault.kind}» after {dict(counts)}")
            time.sleep(0.002)
        recovery[fault.kind].append(last - begun)
        watch.look()
        time.sleep(rng.uniform(0.0, 0.3))
    return counts, recovery


def _last_token_at(clients: Clients, client: int | None) -> float:
    return clients.last_token_at if client is None else clients.tally.last_token_at[client]


def is_clean(report: dict[str, object], *, is_deterministic: bool = False) -> bool:
    """Return whether nothing was lost or left behind, and answers differ no more often than near ties explain, if
    `is_deterministic` never."""
    differences, tokens = report["differences"], report["tokens"]
    assert isinstance(differences, list) and isinstance(tokens, int)
    must_be_empty = ("failures", "hung clients", "blocks held at the end", "exit code", "left behind")
    num_allowed = 0 if is_deterministic else tokens / 1000
    return not any(report[name] for name in must_be_empty) and len(differences) <= num_allowed


def start(
    arguments: argparse.Namespace, folder: Path, options: list[str], environment: dict[str, str], stack: ExitStack
) -> tuple[Engine, Network | None]:
    """Start the engine, and the hosts of its ranks. The stack ends them."""
    num_hosts, network = arguments.hosts, None
    if num_hosts > 1:
        options = [*options, "--hosts", str(num_hosts)]
    if arguments.distributed_executor_backend == "ray":
        network = stack.enter_context(RayNetwork(num_hosts + 1))
        engine: Engine = RayEngine(network, *options, changes=list(environment.items()))
    elif num_hosts > 1:
        network = stack.enter_context(Network(folder, num_hosts + 1))
        network.private += [Path(arguments.kv_disk)] if arguments.kv_disk else []
        for number in range(1, num_hosts + 1):
            network.join(number)
        engine = SpreadEngine(network, *options, more=environment)
    else:
        engine = Engine(folder, options, environment)
    stack.enter_context(engine)
    engine.wait_ready()
    return engine, network


def write_last_lines(engine: Engine) -> None:
    """Write the end of the engine's log to stderr."""
    lines = engine.errors.read_text(encoding="utf-8").splitlines(keepends=True)
    sys.stderr.write("".join(lines[-NUM_LAST_LINES:]))


OPTIONS = {
    "--faults": (300,),
    "--seconds": (math.inf, "after which no fault begins"),
    "--clients": (8,),
    "--seed": (0,),
    "--timeout-s": (1.5, "--step-timeout-s and --hang-timeout-s; a model's longest step takes less on a busy machine"),
    "--model": (None, "default: the demo model"),
    "--tensor-parallel-size": (1,),
    "--data-parallel-size": (1,),
    "--hosts": (1, "hosts of the ranks; needs root"),
    "--distributed-executor-backend": ("mp", "mp or ray, which needs ray"),
    "--adapters": (0, f"LoRA adapters, over {ADAPTER_SLOTS} slots"),
    "--images": (False, "serve a model that sees images, and send some"),
    "--deterministic": (
        False,
        "in the model's own dtype, in which other batches would change answers; allows no difference",
    ),
    "--only-signals": (False, "only SIGKILL and SIGSTOP of random processes"),
    "--kv-disk": (None, "folder for KV blocks; the tier process joins the victims"),
}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    options = ["--device", "cpu", "--num-threads", "1"]
    options += ["--deterministic"] if arguments.deterministic else ["--dtype", "float32"]
    timeout_s = str(arguments.timeout_s)
    options += ["--step-timeout-s", timeout_s, "--hang-timeout-s", timeout_s, "--max-num-seqs", "16"]
    options += ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    options += ["--data-parallel-size", str(arguments.data_parallel_size)]
    if arguments.kv_disk:
        options += ["--kv-disk", arguments.kv_disk, *TIER_OPTIONS]
    with tempfile.TemporaryDirectory() as runtime:
        adapters: list[Path] = []
        environment: dict[str, str] = {}
        if arguments.images:
            from tokenloom.tests.support.vision_checkpoints import vision_checkpoint

            arguments.model = str(vision_checkpoint(Path(runtime) / "model", VISION_MODEL))
        if arguments.model:
            options += ["--model", arguments.model]
        if arguments.adapters:
            model = Path(arguments.model or DEMO_FOLDER)
            adapters = write_adapters(Path(runtime) / "adapters", model, arguments.adapters + 1)
            options += adapter_options(adapters)
            environment["XDG_CACHE_HOME"] = str(linked_cache(Path(runtime) / "cache"))
        options += ["--listen", f"ipc://{runtime}/engine.sock"]
        with ExitStack() as stack:
            engine, network = start(arguments, Path(runtime), options, environment, stack)
            stack.callback(write_last_lines, engine)
            for path in adapters[:-1]:
                shutil.rmtree(path)  # the engine has copies of its own
            report = run(arguments, engine, adapters, network)
    print_json(report, arguments.json)
    return 0 if is_clean(report, is_deterministic=arguments.deterministic) else 1


if __name__ == "__main__":
    sys.exit(main())
