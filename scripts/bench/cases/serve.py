"""Measure serving: requests arrive at a running engine by a Poisson process, through one AsyncClient.

    engine-launch serve …
    engine-launch bench serve --rate 2 --num-requests 100 --in 128 --out 64

Without an address it is the engine of this user that runs; of several one is chosen. An engine of this machine may be
named by its http:// address too; its socket is used, which the table is about. HTTP is measured by `bench served`.

Measured at the client: TTFT (submit to first token), TPOT ((last - first token) / (tokens - 1), per request), ITL (time
between two tokens of a request; tokens that arrive together count as one), p50 and p99 each; output tokens/s from the
first arrival to the last token; goodput: requests/s that met both --ttft-slo-ms and --tpot-slo-ms. One row per --rate,
"inf" submits everything at once. --in and --out take N or LOW:HIGH, drawn uniformly. Lengths and gaps follow
--workload-seed and are the same at every rate; prompts are new at every rate and in every run, so that the engine's
prefix cache holds none of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import secrets
import sys
import time
from dataclasses import dataclass, field

from tokenloom import AsyncClient, SamplingParams, TokenloomError
from tokenloom.frontend.cli.engines import StandardTerminal, client_places
from tokenloom.frontend.launcher.engine_record import running_engines
from tokenloom.scripts.bench.report import Report, percentile
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import FIRST_ID


@dataclass
class Call:
    """One request: prompt, submit time and arrival times of its tokens (seconds since the start of the run)."""

    arrival_s: float
    prompt: list[int]
    num_out: int
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Return the mean seconds between tokens; 0 for a single token."""
        return (self.token_s[-1] - self.token_s[0]) / max(len(self.token_s) - 1, 1)

    @property
    def between_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.token_s)]


def draw_calls(options: argparse.Namespace, rate: float, vocab_size: int) -> list[Call]:
    """Draw the calls of one rate: lengths and gaps from the seed, prompts new at each call of this function."""
    draw, draw_prompt = random.Random(str(options.workload_seed)), random.Random(secrets.randbits(128))
    clock, calls = 0.0, []
    ids = range(min(FIRST_ID, vocab_size - 1), vocab_size)
    for _ in range(options.num_requests):
        num_in, num_out = draw.randint(*options.num_in), draw.randint(*options.num_out)
        calls.append(Call(clock, draw_prompt.choices(ids, k=num_in), num_out))
        clock += draw.expovariate(1.0) / rate
    return calls


async def run_call(client: AsyncClient, call: Call, begun: float) -> None:
    await asyncio.sleep(max(call.arrival_s - (time.perf_counter() - begun), 0))
    params = SamplingParams(temperature=0.0, max_tokens=call.num_out, ignore_eos=True)
    call.sent_s = time.perf_counter() - begun
    try:
        async for output in client.generate(call.prompt, params):
            now = time.perf_counter() - begun
            call.token_s += [now] * (len(output.outputs[0].token_ids) - len(call.token_s))
    except TokenloomError as error:
        call.error = str(error)


async def run_rate(client: AsyncClient, calls: list[Call]) -> None:
    begun = time.perf_counter()
    await asyncio.gather(*(run_call(client, call, begun) for call in calls))


def summarize(rate: float, calls: list[Call], ttft_slo_s: float, tpot_slo_s: float) -> dict[str, float | int | None]:
    """Build one row of the table; a failed call is counted and misses every objective."""
    done = [call for call in calls if not call.error and call.token_s]
    between = [gap for call in done for gap in call.between_s]
    row: dict[str, float | int | None] = {"rate": rate, "finished": len(done), "failed": len(calls) - len(done)}
    for name, values in (
        ("ttft", [call.ttft_s for call in done]),
        ("tpot", [call.tpot_s for call in done if len(call.token_s) > 1]),
        ("itl", between),
    ):
        for percent in (50, 99):
            row[f"{name}_p{percent}_ms"] = percentile(values, percent) * 1e3 if values else None
    if done:
        elapsed = max(call.token_s[-1] for call in done)
        good = sum(call.ttft_s <= ttft_slo_s and call.tpot_s <= tpot_slo_s for call in done)
        row["out_tokens_per_s"] = sum(len(call.token_s) for call in done) / elapsed
        row["goodput_per_s"] = good / elapsed
    return row


async def measure_rates(options: argparse.Namespace, report: Report) -> None:
    places, key_file = client_places(options.address, options.key_file, running_engines(), StandardTerminal())
    async with AsyncClient(places, key_file=key_file) as client:
        info = await client.info()
        report.note("model", info.model)
        longest = options.num_in[1] + options.num_out[1]
        if longest > info.max_model_len:
            raise SystemExit(
                f"--in and --out reach {longest} tokens, the engine's max_model_len is {info.max_model_len}"
            )
        await run_rate(client, draw_calls(options, float("inf"), info.vocab_size)[: options.warm_up])
        for rate in options.rate:
            calls = draw_calls(options, rate, info.vocab_size)
            await run_rate(client, calls)
            report.add(**summarize(rate, calls, options.ttft_slo_ms / 1e3, options.tpot_slo_ms / 1e3))
            for error in sorted({call.error for call in calls if call.error})[:3]:
                print(f"rate {rate}: {error}", file=sys.stderr)


def number_or_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    bounds = int(low), int(high or low)
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text} must be N or LOW:HIGH with 1 <= LOW <= HIGH")
    return bounds


def positive_rate(text: str) -> float:
    rate = float(text)
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0, in requests per second, or inf")
    return rate


def measure(setup: Setup) -> None:
    asyncio.run(measure_rates(setup.arguments, setup.report))


OPTIONS = {
    "address": (None, "http://…, ipc://… or tcp://… of a running engine; none: the one of this user"),
    "--key-file": (None, "for a tcp:// address, made by `engine-launch keygen`"),
    "--rate": ([1.0], "requests per second", positive_rate),
    "--num-requests": (100,),
    "--in": ((128, 128), "N or LOW:HIGH", number_or_range),
    "--out": ((64, 64), "N or LOW:HIGH", number_or_range),
    "--ttft-slo-ms": (1000.0,),
    "--tpot-slo-ms": (100.0,),
    "--warm-up": (2, "requests before the measurement"),
    "--workload-seed": (0,),
}
CASE = Case("serve", measure, OPTIONS, model="", rounds=0)
