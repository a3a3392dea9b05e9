"""Measure the flex class: the cost of a batch of it for other requests, and of the class for a batch alone.

    engine-launch bench flex 135m --rate 2 --prompt 128 --answer 64 --seconds 60

Per round: (1) requests arrive at random for --seconds, alone; (2) the same arrivals beside a batch of the flex class of
which --open requests are always open: times to the first token and between tokens (p50, p99) at the client, and the
tokens of the batch per second; (3) --open requests of each class alone, in turn: tokens per second, of the flex class
after a pause, since its steps are short for a while after other requests. New random token ids in each request. All
flags of engine-launch are taken.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from queue import Empty
from typing import NamedTuple

from tokenloom.core.features.flex import LATELY_S
from tokenloom.frontend.client.transport import Transport
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.frontend.llm import open_private
from tokenloom.scripts.bench.cases.mixed import Load
from tokenloom.scripts.bench.report import median, percentile
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import FIRST_ID

BATCH_PROMPT, BATCH_ANSWER = 256, 64  # tokens of a request of the batch
PATIENCE_S = 120.0


class Sizes(NamedTuple):
    """Tokens of a request."""

    prompt: int
    answer: int


class Client:
    """Requests of both classes at one engine. `submitted[i]`: the time of request i."""

    def __init__(self, transport: Transport, draw: random.Random, vocab_size: int) -> None:
        self.load, self.submitted = Load(transport), list[float]()
        self._draw, self._vocab_size = draw, vocab_size

    def submit(self, sizes: Sizes, *, is_flex: bool) -> int:
        prompt = self._draw.choices(range(FIRST_ID, self._vocab_size), k=sizes.prompt)
        self.submitted.append(time.perf_counter())
        return self.load.submit(prompt, sizes.answer, service_tier="flex" if is_flex else "default")

    def wait(self, until: Callable[[], bool], deadline: float) -> None:
        """Take updates until a condition holds or the deadline has passed."""
        while not until() and (left_s := deadline - time.perf_counter()) > 0:
            try:
                self.load.take(left_s)
            except Empty:
                return

    def has_ended(self, index: int, sizes: Sizes) -> bool:
        return len(self.load.times[index]) >= sizes.answer


class Times(NamedTuple):
    """Seconds of the requests that arrived at random, and the rate of the batch beside them."""

    first: list[float]
    between: list[float]
    batch_rate: float  # tokens per second


def serve(client: Client, arrivals: Sequence[float], sizes: Sizes, num_open: int) -> Times:
    """Send requests at `arrivals`, in seconds from now, beside `num_open` requests of the flex class, each of which
    another one follows."""
    batch = Sizes(BATCH_PROMPT, BATCH_ANSWER)
    flex = [client.submit(batch, is_flex=True) for _ in range(num_open)]
    begun, online = time.perf_counter(), list[int]()
    num_done = 0

    def refill() -> bool:
        nonlocal num_done
        for place, index in enumerate(flex):
            if client.has_ended(index, batch):
                flex[place] = client.submit(batch, is_flex=True)
                num_done += 1
        return False

    for arrival in arrivals:
        client.wait(refill, begun + arrival)
        online.append(client.submit(sizes, is_flex=False))
    deadline = time.perf_counter() + PATIENCE_S
    client.wait(lambda: refill() or all(client.has_ended(each, sizes) for each in online), deadline)
    taken_s = time.perf_counter() - begun
    times = [client.load.times[index] for index in online]
    num_tokens = num_done * (BATCH_PROMPT + BATCH_ANSWER)
    client.load.cancel()
    return Times(
        [each[0] - client.submitted[index] for index, each in zip(online, times, strict=True)],
        [after - before for each in times for before, after in itertools.pairwise(each)],
        num_tokens / taken_s,
    )


def batch_rate(client: Client, num_open: int, *, is_flex: bool) -> float:
    """Return the tokens per second of a batch alone."""
    sizes, begun = Sizes(BATCH_PROMPT, BATCH_ANSWER), time.perf_counter()
    batch = [client.submit(sizes, is_flex=is_flex) for _ in range(num_open)]
    client.wait(lambda: all(client.has_ended(each, sizes) for each in batch), begun + PATIENCE_S)
    return num_open * sum(sizes) / (time.perf_counter() - begun)


def measure(setup: Setup) -> None:
    arguments, report = setup.arguments, setup.report
    config, draw = config_from_keywords("LLM", setup.folder, setup.options), random.Random(0)
    sizes = Sizes(arguments.prompt, arguments.answer)
    transport, close = open_private(config)
    setup.stack.callback(close)

    def new_client() -> Client:
        return Client(transport, draw, setup.workload.vocab_size)

    batch_rate(new_client(), 4, is_flex=False)
    ratios: dict[str, list[float]] = {"first": [], "between": [], "batch": []}
    for number in range(arguments.rounds):
        gaps = [draw.expovariate(arguments.rate) for _ in range(int(arguments.rate * arguments.seconds))]
        arrivals = list(itertools.accumulate(gaps))
        alone = serve(new_client(), arrivals, sizes, 0)
        beside = serve(new_client(), arrivals, sizes, arguments.open)
        plain = batch_rate(new_client(), arguments.open, is_flex=False)
        time.sleep(LATELY_S)
        flex = batch_rate(new_client(), arguments.open, is_flex=True)
        ratios["first"].append(percentile(beside.first, 99) / percentile(alone.first, 99))
        ratios["between"].append(percentile(beside.between, 99) / percentile(alone.between, 99))
        ratios["batch"].append(flex / plain)
        row: dict[str, float] = {"round": number + 1}
        for name, times in (("", alone), ("_beside", beside)):
            row[f"ttft_p50_ms{name}"] = median(times.first) * 1e3
            row[f"ttft_p99_ms{name}"] = percentile(times.first, 99) * 1e3
            row[f"itl_p50_ms{name}"] = median(times.between) * 1e3
            row[f"itl_p99_ms{name}"] = percentile(times.between, 99) * 1e3
        report.add(**row, batch_beside=beside.batch_rate, batch_alone=flex, batch_default=plain)
    report.note("p99 to the first token beside a batch, relative to alone", median(ratios["first"]))
    report.note("p99 between tokens beside a batch, relative to alone", median(ratios["between"]))
    report.note("tokens/s of a batch alone, flex relative to the default class", median(ratios["batch"]))


OPTIONS = {
    "--rate": (2.0, "arrivals a second"),
    "--seconds": (60.0, "during which requests arrive"),
    "--prompt": (128, "tokens of such a prompt"),
    "--answer": (64, "tokens of its answer"),
    "--open": (64, "requests of the batch that are open at a time"),
}
CASE = Case("flex", measure, OPTIONS)
