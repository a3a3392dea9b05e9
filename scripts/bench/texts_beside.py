"""Measure what texts to embed cost the generating rows of one engine: both alone and beside each other, in turn.

The rows are a closed loop: when an answer ends, the next request of its row comes, so there are first tokens at all
times. The texts arrive at random at a given rate. All requests are new random token ids.
"""

from __future__ import annotations

import itertools
import random
import time
from queue import Empty, SimpleQueue
from typing import NamedTuple

from tokenloom.frontend.client.open_request import Update
from tokenloom.frontend.client.transport import Transport
from tokenloom.frontend.forms.prompts import new_submit
from tokenloom.ipc.messages.client import Delta
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.scripts.bench.cases.mixed import Load
from tokenloom.scripts.bench.contestant import ANSWER_TIMEOUT_S
from tokenloom.scripts.bench.report import Report, median, percentile
from tokenloom.scripts.bench.workload import FIRST_ID

NUM_PROMPT, NUM_ANSWER = 32, 64  # tokens of a generating request
WARM_S = 3.0  # of an arm, before its times count
_numbers = itertools.count()


class Shape(NamedTuple):
    """The load of an arm: `rows` that generate, `rate` texts a second of `median_tokens`, for `seconds`."""

    rows: int
    rate: float
    median_tokens: int
    seconds: float


class Times(NamedTuple):
    """Seconds of the requests of one arm."""

    first: list[float]  # to the first token
    between: list[float]  # between tokens
    texts: list[float]  # to the vector of a text


class Texts:
    """Texts to embed that are sent at random times; `taken_s`: seconds of each that has its vector."""

    def __init__(self, transport: Transport, shape: Shape, draw: random.Random, vocab_size: int) -> None:
        self._transport, self._shape, self._draw, self._vocab_size = transport, shape, draw, vocab_size
        self._arrivals: SimpleQueue[tuple[float, float, Update]] = SimpleQueue()  # sent at, ended at
        self._next_at = time.perf_counter()
        self.num_sent = 0
        self.taken_s: list[float] = []

    def send_due(self) -> None:
        """Send the texts whose time has come."""
        while self._shape.rate and (now := time.perf_counter()) >= self._next_at:
            self._next_at += self._draw.expovariate(self._shape.rate)
            count = max(1, round(self._shape.median_tokens * self._draw.lognormvariate(0, 0.8)))
            prompt = self._draw.choices(range(FIRST_ID, self._vocab_size), k=min(count, 8 * self._shape.median_tokens))
            submit = new_submit(
                f"text-{next(_numbers)}",
                {"prompt_token_ids": prompt},
                SamplingParams(max_tokens=1),
                PoolingParams(task="embed"),
            )
            self.num_sent += 1
            self._transport.submit(submit, lambda update, at=now: self._put(at, update))

    def _put(self, sent_at: float, update: Update) -> None:
        self._arrivals.put((sent_at, time.perf_counter(), update))

    def take(self, timeout_s: float) -> None:
        """Take the updates that are there; of none, wait for one."""
        while True:
            try:
                sent_at, ended_at, update = self._transport.wait(self._arrivals, timeout_s)
            except Empty:
                return
            if isinstance(update, Exception):
                raise update
            if isinstance(update, Delta) and update.finish_reason is not None:
                assert update.embedding is not None, update.finish_reason
                self.taken_s.append(ended_at - sent_at)
            timeout_s = 0.0


def run_arm(transport: Transport, shape: Shape, draw: random.Random, vocab_size: int) -> Times:
    """Run rows and texts for the seconds of a shape; cancel the rows, and wait for the last texts."""
    load, texts = Load(transport), Texts(transport, shape, draw, vocab_size)
    submitted: list[float] = []

    def submit() -> int:
        submitted.append(time.perf_counter())
        return load.submit(draw.choices(range(FIRST_ID, vocab_size), k=NUM_PROMPT), NUM_ANSWER)

    begun = time.perf_counter()
    rows = [submit() for _ in range(shape.rows)]
    while time.perf_counter() - begun < WARM_S + shape.seconds:
        texts.send_due()
        texts.take(0.0)
        try:
            load.take(0.002)
        except Empty:
            continue
        for place, index in enumerate(rows):
            if len(load.times[index]) >= NUM_ANSWER:
                rows[place] = submit()
    load.cancel()
    deadline = time.perf_counter() + ANSWER_TIMEOUT_S
    while len(texts.taken_s) < texts.num_sent and time.perf_counter() < deadline:
        texts.take(0.1)
    counted_from = begun + WARM_S
    gaps = [
        after - before for each in load.times for before, after in itertools.pairwise(each) if before > counted_from
    ]
    first = [times[0] - at for at, times in zip(submitted, load.times, strict=True) if times and at > counted_from]
    return Times(first, gaps, texts.taken_s)


def measure_beside(transport: Transport, shape: Shape, rounds: int, vocab_size: int, report: Report) -> None:
    """Run both arms in each round, in turn, and report each and their ratios."""
    draw = random.Random(7)
    run_arm(transport, shape._replace(seconds=1.0), draw, vocab_size)  # warm up
    ratios: dict[str, list[float]] = {"between": [], "first": []}
    for number in range(1, rounds + 1):
        rates = [0.0, shape.rate] if number % 2 else [shape.rate, 0.0]
        arms = {rate: run_arm(transport, shape._replace(rate=rate), draw, vocab_size) for rate in rates}
        alone, beside = arms[0.0], arms[shape.rate]
        ratios["between"].append(percentile(beside.between, 99) / percentile(alone.between, 99))
        ratios["first"].append(percentile(beside.first, 99) / percentile(alone.first, 99))
        row: dict[str, float] = {"round": number}
        for name, times in (("", alone), ("_beside", beside)):
            row[f"itl_p50_ms{name}"] = median(times.between) * 1e3
            row[f"itl_p99_ms{name}"] = percentile(times.between, 99) * 1e3
            row[f"ttft_p50_ms{name}"] = median(times.first) * 1e3
            row[f"ttft_p99_ms{name}"] = percentile(times.first, 99) * 1e3
        row["text_p50_ms"], row["text_p99_ms"] = (percentile(beside.texts, each) * 1e3 for each in (50, 99))
        report.add(**row)
    report.note("p99 between tokens beside texts, relative to alone", median(ratios["between"]))
    report.note("p99 to the first token beside texts, relative to alone", median(ratios["first"]))
