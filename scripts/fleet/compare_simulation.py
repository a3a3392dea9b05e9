"""Compare a simulated fleet with a real one: two engines here, behind the same router, with the same requests.

    python scripts/fleet/compare_simulation.py 135m --num-threads 1 --step-cost A,B,C,D,E

Conversations of a few turns, each of which begins with all before it, come at fixed times. They are sent to --engines
engines, through the engine's Router in this process, and then simulated with exact and with fluid replicas of the same
sizes. fit_step_cost.py finds --step-cost; fit it with --beside, on the same machine. Printed of each: the share
of prompt tokens found in a prefix cache, and seconds to the first token and to the end. All flags of engine-launch are
taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Sequence

from tokenloom import AsyncClient, SamplingParams
from tokenloom.frontend.embedded.child_engine import ChildEngine
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.frontend.server.replicas.router import Router
from tokenloom.scripts.bench.report import percentile
from tokenloom.scripts.bench.runner import REQUIRED, Case, Setup, run_case
from tokenloom.scripts.fleet.exact_replica import ExactReplica, spec_of, tokens_of
from tokenloom.scripts.fleet.replica import FluidReplica, Sizes, StepCost
from tokenloom.scripts.fleet.simulation import FleetSimulation
from tokenloom.scripts.fleet.traces import BLOCK, Job

FIRST_KEY = 10  # keys become token ids


def conversations(duration_s: float, rate: float, seed: int) -> list[Job]:
    """Return requests of conversations of 1 to 3 turns with prompts of 1 to 4 blocks, `rate` of them a second."""
    draw, found, key, at = random.Random(seed), list[tuple[float, int, int, list[int]]](), FIRST_KEY, 0.0
    while at < duration_s:
        at += draw.expovariate(rate / 2)
        turn_at, keys = at, list[int]()
        for _ in range(draw.randint(1, 3)):
            num_new = draw.randint(1, 2) if not keys else 1
            keys = [*keys, *range(key, key + num_new)]
            key += num_new
            found.append((turn_at, len(keys) * BLOCK + draw.randint(10, 200), draw.randint(20, 120), keys))
            turn_at += draw.uniform(8, 20)
    return [Job(number, *each) for number, each in enumerate(sorted(found)) if each[0] < duration_s]


class RealFleet:
    """Sender of jobs to engines, as a frontend with several cores would send them. It records when their tokens
    come."""

    def __init__(self, clients: Sequence[AsyncClient], capacity_tokens: int) -> None:
        self._clients, self._router = clients, Router(key_tokens=BLOCK)
        for core in range(len(clients)):
            self._router.add(core, capacity_tokens)
        self._begun_at = 0.0

    async def run(self, jobs: Sequence[Job]) -> None:
        for client in self._clients:
            await self._answer(client, [1] * 300, 20)  # warm up
        self._begun_at = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(self._run(job))

    async def _answer(self, client: AsyncClient, prompt: list[int], num_output: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        async for _ in client.generate(prompt, params):
            pass

    def _now(self) -> float:
        return time.monotonic() - self._begun_at

    async def _run(self, job: Job) -> None:
        prompt = tokens_of(job).tolist()
        await asyncio.sleep(max(job.arrived_at - self._now(), 0.0))
        router, now = self._router, self._now()
        core = router.pick(job.keys, job.num_tokens, now)
        assert core is not None
        job.core, job.arrived_at = core, now
        router.on_sent(job.number, core, job.keys, job.num_tokens, now)
        params = SamplingParams(temperature=0.0, max_tokens=job.num_output_tokens, ignore_eos=True)
        async for output in self._clients[core].generate(prompt, params):
            if job.first_token_at < 0 and output.outputs[0].token_ids:
                job.first_token_at, job.num_cached_tokens = self._now(), output.num_cached_tokens
                router.on_started(job.number, job.num_cached_tokens)
                router.on_first_token(job.number, job.first_token_at)
        job.finished_at = self._now()
        router.on_finished(job.number, job.num_output_tokens, job.finished_at)


def figures(jobs: Sequence[Job]) -> dict[str, float]:
    ttft = [job.first_token_at - job.arrived_at for job in jobs]
    return {
        "cached": sum(job.num_cached_tokens for job in jobs) / sum(job.num_prompt_tokens for job in jobs),
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p90_s": percentile(ttft, 90),
        "mean_duration_s": sum(job.finished_at - job.arrived_at for job in jobs) / len(jobs),
    }


class _Engine:
    """A child engine that `closing` can stop."""

    def __init__(self, engine: ChildEngine) -> None:
        self.address, self.close = engine.addresses[0], engine.stop


def measure(setup: Setup) -> None:
    asked = setup.arguments
    cost = StepCost(*map(float, asked.step_cost.split(",")))
    block_size = 16
    for name, value in (("speculation", "off"), ("num_kv_blocks", asked.pool_tokens // block_size + 1)):
        setup.options.setdefault(name, value)
    config = config_from_keywords("LLM", setup.folder, setup.options)
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(contextlib.closing(_Engine(ChildEngine(config)))) for _ in range(asked.engines)]

        async def send(jobs: Sequence[Job]) -> None:
            async with contextlib.AsyncExitStack() as clients:
                opened = [await clients.enter_async_context(AsyncClient(each.address)) for each in engines]
                await RealFleet(opened, asked.pool_tokens).run(jobs)

        real = conversations(asked.duration_s, asked.rate, 0)
        asyncio.run(send(real))
    found = {"real": figures(real)}
    sizes = Sizes(asked.pool_tokens, config.max_num_seqs, config.max_num_batched_tokens or 512)
    spec = spec_of(sizes, block_size)
    for name, new in (("exact", lambda: ExactReplica(cost, sizes, spec)), ("fluid", lambda: FluidReplica(cost, sizes))):
        jobs = conversations(asked.duration_s, asked.rate, 0)
        router = Router(key_tokens=BLOCK)
        FleetSimulation(jobs, asked.engines, new, router, capacity_tokens=asked.pool_tokens).run()
        found[name] = figures(jobs)
    for name, row in found.items():
        setup.report.add(fleet=name, requests=len(real), **row)
        if name != "real":
            setup.report.note(f"{name} over real", {key: row[key] / found["real"][key] for key in row})


OPTIONS = {
    "--step-cost": (REQUIRED, "A,B,C,D,E: seconds, of fit_step_cost.py"),
    "--engines": (2,),
    "--rate": (0.5, "requests per second, all engines together"),
    "--duration-s": (120.0,),
    "--pool-tokens": (40_000,),
}
CASE = Case("simulation", measure, OPTIONS, dtype="bfloat16")


if __name__ == "__main__":
    sys.exit(run_case(CASE, __doc__))
