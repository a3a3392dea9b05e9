"""Fit the seconds of a step for scripts/fleet/simulate_fleet.py --step-cost, from the steps of a real worker.

    python scripts/fleet/fit_step_cost.py 135m --num-threads 1 --beside 1

A core and a worker in this process answer random requests for --seconds; the number of open ones changes all the time.
Of each step the numbers that StepCost takes and the worker's own `execute_s` are noted, and a line through them is
fitted by least squares, longer steps with less weight, with no part below zero. --beside N starts as
many other processes that do the same, since the replicas of one machine share its memory. All flags of engine-launch
are taken.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from tokenloom.core.engine import EngineCore
from tokenloom.core.features.grammar.local_helper import LocalGrammarHelper
from tokenloom.core.features.new import Surroundings
from tokenloom.frontend.checkpoint.resolve import resolve
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.core import CoreChild, EngineCoreRequest
from tokenloom.ipc.messages.workers import SchedulerOutput, TokenMask
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.sockets.addresses import RunDirectory
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.runner import Case, Setup, run_case
from tokenloom.scripts.bench.workload import FIRST_ID, flags_of
from tokenloom.scripts.fleet.exact_replica import StepSizes
from tokenloom.scripts.fleet.replica import StepCost
from tokenloom.workers.worker import Worker

WARM_UP_STEPS = 20


class _Steps:
    """Executor of the core that keeps steps until they are run."""

    def __init__(self) -> None:
        self.waiting: deque[SchedulerOutput] = deque()

    def send(self, message: SchedulerOutput | TokenMask) -> None:
        assert isinstance(message, SchedulerOutput)
        self.waiting.append(message)


def run_steps(config: EngineConfig, seconds: float, most_rows: int, most_tokens: int) -> Iterator[tuple[float, ...]]:
    """Yield the numbers of StepSizes and the seconds of each step of a worker with random requests."""
    run_directory = RunDirectory.create()
    try:
        spec = resolve(config, run_directory)
        worker = Worker(spec, rank=0, generation=0)
        for _ in worker.load():
            pass
        measured = worker.measure()
        pool = PoolShape.of(measured.pool_bytes, measured.block_bytes)
        worker.initialize(pool)
        steps = _Steps()
        core = EngineCore(spec, pool, steps, Surroundings(LocalGrammarHelper(spec)))
        sizes, draw, key = StepSizes(config.max_num_seqs), random.Random(0), 0
        most_tokens = min(most_tokens, spec.max_model_len - 200)
        ends_at, wanted = time.monotonic() + seconds, 1
        while time.monotonic() < ends_at:
            if draw.random() < 0.02:
                wanted = draw.randint(1, most_rows)
            if core.num_requests < wanted and draw.random() < 0.1:
                core.add_request(0, _request(key, draw, most_tokens, spec.model.vocab_size))
                key += 1
            core.step()
            if steps.waiting:
                assert worker.runner is not None
                step = steps.waiting.popleft()
                result = worker.runner.execute(step, lambda: None)
                core.on_result(result)
                core.take_outputs()
                yield (*sizes.of(step), result.execute_s)
    finally:
        run_directory.remove()


def _request(key: int, draw: random.Random, most_tokens: int, vocab_size: int) -> EngineCoreRequest:
    num_output = draw.randint(4, 150)
    prompt = draw.choices(range(FIRST_ID, vocab_size), k=int(2 ** draw.uniform(3, np.log2(most_tokens))))
    return EngineCoreRequest(
        children=[CoreChild(key=key, seed=key)],
        prompt_token_ids=encode_ids(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
        max_tokens=num_output,
        stop_token_ids=[],
        arrival_time=time.time(),
    )


def fit(steps: Sequence[tuple[float, ...]]) -> StepCost:
    """Return the cost with the least squares of errors over the root of the seconds, none of its parts below 0. steps:
    the numbers of StepSizes and the seconds of each."""
    table = np.array(steps, np.float64)
    root = np.sqrt(table[:, -1:])
    features = np.column_stack([np.ones(len(table)), table[:, :-1]]) / root
    kept, parts = list(range(5)), np.zeros(5)
    while kept:
        found = np.linalg.lstsq(features[:, kept], root[:, 0], rcond=None)[0]
        if (found >= 0).all():
            parts[kept] = found
            break
        kept.pop(int(found.argmin()))
    return StepCost(*parts.tolist())


def measure(setup: Setup) -> None:
    setup.options.setdefault("speculation", "off")
    asked = setup.arguments
    shape = [f"--seconds={asked.seconds + 30}", f"--most-rows={asked.most_rows}", f"--most-tokens={asked.most_tokens}"]
    command = [sys.executable, "-P", __file__, str(setup.folder), *shape, *flags_of(setup.options)]
    with contextlib.ExitStack() as stack:
        for _ in range(asked.beside):
            other = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            stack.callback(other.kill)
        config = config_from_keywords("LLM", setup.folder, setup.options)
        steps = list(run_steps(config, asked.seconds, asked.most_rows, asked.most_tokens))[WARM_UP_STEPS:]
    cost = fit(steps)
    seconds = np.array([step[-1] for step in steps])
    errors = np.array([cost.seconds(*map(int, step[:-1])) for step in steps]) / seconds - 1
    kinds = {"all": np.ones(len(steps), bool), "prompts": np.array([step[1] > 0 for step in steps])}
    kinds["decodes"] = ~kinds["prompts"]
    for kind, chosen in kinds.items():
        chosen_errors = np.abs(errors[chosen])
        setup.report.add(
            steps=kind,
            number=int(chosen.sum()),
            median_ms=float(1000 * np.median(seconds[chosen])),
            median_error=float(np.median(chosen_errors)),
            p90_error=float(np.percentile(chosen_errors, 90)),
            total_error=float((errors[chosen] * seconds[chosen]).sum() / seconds[chosen].sum()),
        )
    setup.report.note("--step-cost", ",".join(f"{part:.4g}" for part in cost))


OPTIONS = {
    "--seconds": (60.0, "of measurement"),
    "--most-rows": (16, "open requests"),
    "--most-tokens": (2000, "of a prompt"),
    "--beside": (0, "processes that do the same at once"),
}
CASE = Case("step cost", measure, OPTIONS, dtype="bfloat16")


if __name__ == "__main__":
    sys.exit(run_case(CASE, __doc__))
