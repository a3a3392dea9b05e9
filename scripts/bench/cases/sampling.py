"""Measure the cost of sampling parameters: the whole engine's decode step with all of them on, beside the greedy step.

    engine-launch bench sampling 135m --batch 32 --num-threads 1
    engine-launch bench sampling 135m --batch 32 --num-threads 1 --with-deterministic

Frontend, core and worker in this process, without sockets; `--batch` requests decode at once, the rows of the table in
turn for `--rounds` rounds. A step lasts from one delta of the answers to the next. All engine-launch flags are taken.
"""

from __future__ import annotations

import time

import msgspec

from tokenloom import SamplingParams
from tokenloom.frontend.embedded.in_process import InProcessEngine
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello
from tokenloom.ipc.messages.client import Credit, Deltas, Submit
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import Workload

TURN_S = 1.0
PENALTIES: dict[str, object] = {"presence_penalty": 0.3, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
FILTERS: dict[str, object] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "temperature, top-k, top-p": FILTERS,
    "penalties": {"temperature": 0.0, **PENALTIES},
    "top-20 logprobs": {"temperature": 0.0, "logprobs": 20},
    "everything": {**FILTERS, **PENALTIES, "logprobs": 20},
}


class Bench:
    """One engine and the steps of its decoding rows."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = InProcessEngine(config)
        self._engine.send(Hello(protocol_version=PROTOCOL_VERSION))
        self._num_requests = 0

    def step_times(self, workload: Workload, fields: dict[str, object]) -> list[float]:
        """Run the workload; return the seconds of each step in which every request got one token, without the first
        step."""
        params = SamplingParams(max_tokens=workload.num_out, ignore_eos=True, seed=1, **fields)  # type: ignore[arg-type]
        for prompt in workload.prompts(self._num_requests):
            self._num_requests += 1
            ids = encode_ids(prompt)
            self._engine.send(Submit(request_id=str(self._num_requests), params=params, prompt_token_ids=ids))
        seconds: list[float] = []
        num_open, begun = workload.num_requests, time.perf_counter()
        while num_open:
            num_tokens = 0
            for message in self._engine.step(TURN_S):
                if isinstance(message, Deltas):
                    self._engine.send(Credit(count=1))
                    num_tokens += sum(len(delta.token_ids) // 4 for delta in message.deltas)
                    num_open -= sum(delta.finish_reason is not None for delta in message.deltas)
            now = time.perf_counter()
            if num_tokens == workload.num_requests:
                seconds.append(now - begun)
            begun = now
        return seconds[1:]  # the first step still prefills

    def close(self) -> None:
        self._engine.close()


def measure_steps(config: EngineConfig, workload: Workload, rounds: int, names: list[str]) -> dict[str, float]:
    """Run the cases in turn in each round; return the median step of each in seconds."""
    bench = Bench(config)
    try:
        seconds: dict[str, list[float]] = {name: [] for name in names}
        bench.step_times(workload, CASES["greedy"])
        for _ in range(rounds):
            for name in names:
                seconds[name] += bench.step_times(workload, CASES[name])
    finally:
        bench.close()
    return {name: median(times) for name, times in seconds.items()}


def measure(setup: Setup) -> None:
    report, asked = setup.report, setup.arguments
    workload = Workload(asked.batch, asked.num_in, asked.num_out, setup.workload.vocab_size)
    defaults = {"log_level": "warning", "max_model_len": 1024, "enable_prefix_caching": False}
    config = msgspec.convert({**defaults, **setup.options, "model": str(setup.folder)}, EngineConfig)
    medians = measure_steps(config, workload, asked.rounds, list(CASES))
    for name, seconds in medians.items():
        report.add(case=name, step_ms=seconds * 1e3, times_greedy=seconds / medians["greedy"])
    if asked.with_deterministic:
        config = msgspec.structs.replace(config, deterministic=True)
        seconds = measure_steps(config, workload, 1, ["greedy"])["greedy"]
        report.add(case="greedy, --deterministic", step_ms=seconds * 1e3, times_greedy=seconds / medians["greedy"])


OPTIONS = {
    "--batch": (32, "requests"),
    "--in": (64,),
    "--out": (24,),
    "--with-deterministic": (False, "the greedy step with --deterministic, too"),
}
CASE = Case("sampling", measure, OPTIONS, rounds=3)
