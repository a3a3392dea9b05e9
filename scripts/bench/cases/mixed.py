"""Measure one request beside others: a prompt with a cached prefix, and a late long prompt among answers.

    engine-launch bench mixed 135m --shared 4096 --prompt 2048 --streams 16

Per round, with new random token ids: (1) two requests that share a prefix of --shared tokens and differ in the 16 that
follow, one after the other: the time to each one's first token. (2) --streams answers run; later a prompt of --prompt
tokens arrives. Measured at the client: the times between tokens of the answers without the prompt (p50, p99), and those
from its submit to its first token (p50, p99, maximum). All flags of engine-launch are taken.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from tokenloom import SamplingParams
from tokenloom.frontend.client.open_request import Update
from tokenloom.frontend.client.transport import Transport
from tokenloom.frontend.forms.prompts import new_submit
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.frontend.llm import open_private
from tokenloom.ipc.codec import num_ids
from tokenloom.ipc.messages.client import Delta
from tokenloom.ipc.params.sampling_params import ServiceTier
from tokenloom.scripts.bench.contestant import ANSWER_TIMEOUT_S
from tokenloom.scripts.bench.report import median, percentile
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import FIRST_ID

NUM_SUFFIX = 16
NUM_STREAM_PROMPT = 16
TOKENS_BEFORE = 24  # of each answer, before the long prompt arrives
_request_numbers = itertools.count()
Arrivals = SimpleQueue[tuple[float, int, Update]]  # time, request index, update


class Load:
    """Requests of one transport; `times[i]`: arrival times of request i's tokens, equal within a message."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._arrivals: Arrivals = SimpleQueue()
        self._ids: list[str] = []
        self.times: list[list[float]] = []

    def submit(
        self,
        prompt: list[int],
        num_out: int,
        adapter: str = "",
        path: str = "",
        service_tier: ServiceTier = "default",
    ) -> int:
        """Submit a request for `num_out` greedy tokens and return its index. `path`: the adapter's, if it is new."""
        index = len(self.times)
        self.times.append([])
        self._ids.append(f"mixed-{next(_request_numbers)}")
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, service_tier=service_tier)
        submit = new_submit(self._ids[-1], {"prompt_token_ids": prompt}, params)
        submit = msgspec.structs.replace(submit, adapter=adapter, adapter_path=path)
        self._transport.submit(submit, lambda update: self._arrivals.put((time.perf_counter(), index, update)))
        return index

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.take(ANSWER_TIMEOUT_S)

    def take(self, timeout_s: float) -> None:
        """Take the next update of a request; Empty if none comes in time."""
        when, index, update = self._transport.wait(self._arrivals, timeout_s)
        if isinstance(update, Exception):
            raise update
        if isinstance(update, Delta):
            self.times[index] += [when] * num_ids(update.token_ids)

    def cancel(self) -> None:
        for each in self._ids:
            self._transport.cancel(each)


def first_token_s(transport: Transport, prompt: list[int]) -> float:
    load, begun = Load(transport), time.perf_counter()
    load.submit(prompt, 1)
    load.run_until(lambda: bool(load.times[0]))
    return load.times[0][0] - begun


def shared_prefix(transport: Transport, num_shared: int, ids: Callable[[int], list[int]]) -> tuple[float, float]:
    """Send two requests with one prefix; return the seconds to first token of each: the second reuses the prefix."""
    prefix = ids(num_shared)
    return first_token_s(transport, prefix + ids(NUM_SUFFIX)), first_token_s(transport, prefix + ids(NUM_SUFFIX))


def between(times: list[float], begin: float, end: float) -> list[float]:
    """Return the gaps between consecutive tokens whose later token arrived between `begin` and `end`."""
    return [after - before for before, after in itertools.pairwise(times) if begin < after <= end]


def prompt_among_answers(
    transport: Transport, num_streams: int, num_prompt: int, num_out: int, ids: Callable[[int], list[int]]
) -> tuple[list[float], list[float], float]:
    """Submit a prompt while `num_streams` answers run. Return the seconds between tokens of the answers without and
    with the prompt, and the seconds to the prompt's first token."""
    load = Load(transport)
    for _ in range(num_streams):
        load.submit(ids(NUM_STREAM_PROMPT), num_out)
    load.run_until(lambda: all(len(times) >= TOKENS_BEFORE for times in load.times))
    begun = time.perf_counter()
    late = load.submit(ids(num_prompt), 1)
    load.run_until(lambda: bool(load.times[late]))
    ended = load.times[late][0]
    load.cancel()
    streams = load.times[:late]
    calm = [gap for times in streams for gap in between(times[4:], 0.0, begun)]  # without the prefill
    return calm, [gap for times in streams for gap in between(times, begun, ended)], ended - begun


def measure(setup: Setup) -> None:
    arguments, report = setup.arguments, setup.report
    config, draw = config_from_keywords("LLM", setup.folder, setup.options), random.Random(0)

    def ids(count: int) -> list[int]:
        return draw.choices(range(FIRST_ID, setup.workload.vocab_size), k=count)

    num_out = min(1000, (config.max_model_len or 4096) - NUM_STREAM_PROMPT)
    prefix_ratios, stall_ratios = [], []
    transport, close = open_private(config)
    setup.stack.callback(close)
    first_token_s(transport, ids(NUM_SUFFIX))
    for number in range(arguments.rounds):
        cold_s, cached_s = shared_prefix(transport, arguments.shared, ids)
        calm, during, late_s = prompt_among_answers(transport, arguments.streams, arguments.prompt, num_out, ids)
        prefix_ratios.append(cached_s / cold_s)
        stall_ratios.append(percentile(during, 99) / median(calm))
        report.add(
            round=number + 1,
            ttft_ms=cold_s * 1e3,
            ttft_cached_ms=cached_s * 1e3,
            itl_p50_ms=median(calm) * 1e3,
            itl_p99_ms=percentile(calm, 99) * 1e3,
            itl_p50_during_ms=median(during) * 1e3,
            itl_p99_during_ms=percentile(during, 99) * 1e3,
            itl_max_during_ms=max(during) * 1e3,
            late_ttft_ms=late_s * 1e3,
        )
    report.note("first token of a cached prefix relative to the first", median(prefix_ratios))
    report.note("p99 between tokens during the prompt relative to the median without", median(stall_ratios))


OPTIONS = {
    "--shared": (4096, "tokens of the shared prefix"),
    "--prompt": (2048, "tokens of the late prompt"),
    "--streams": (16, "answers that run when the late prompt arrives"),
}
CASE = Case("mixed", measure, OPTIONS)
